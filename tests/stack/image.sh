#!/bin/sh
# Builds the image of profile cpu where no registry is reached: the steps of its Containerfile on a base made here.
# As root on Debian with buildah, debootstrap and a pip that finds torch's CPU wheel; takes minutes and 10 GB.
#   sh tests/stack/image.sh WORK_FOLDER DEBIAN_MIRROR
set -eu
work=$1 mirror=$2
python=${PYTHON:-.venv/bin/python} pip=${PIP:-.venv/bin/pip}
mkdir -p "$work"

debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$work/base" "$mirror"
base=$(buildah from scratch)
mounted=$(buildah mount "$base")
cp -a "$work/base/." "$mounted/"
ln -sf python3 "$mounted/usr/bin/python"
buildah umount "$base" >/dev/null
buildah config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$base"
buildah commit --rm "$base" localhost/stack-base:bookworm

"$pip" wheel --quiet --no-deps -w "$work/dist" .
"$python" - "$work" <<'P'
import sys
from pathlib import Path

from moetier_stack.image import write_context
from moetier_stack.workspace import Workspace

work = Path(sys.argv[1])
write_context(Workspace(Path("stack")), "cpu", next((work / "dist").glob("moetier-*.whl")), work / "context")
P
# What pip would fetch in the build is fetched before, by the same hashes.
"$pip" download --quiet --no-deps --require-hashes -r "$work/context/requirements.txt" -d "$work/wheels"
printf '[global]\nno-index = true\nfind-links = /wheels\n[install]\nno-compile = true\n' > "$work/pip.conf"

# The only change: the base, which a registry would have.
sed 's#^FROM [^ ]*#FROM localhost/stack-base:bookworm#' "$work/context/Containerfile" > "$work/Containerfile.local"
buildah build --layers --isolation chroot --network host -v "$work/wheels:/wheels:ro" \
  -v "$work/pip.conf:/etc/pip.conf:ro" --file "$work/Containerfile.local" --tag moetier:cpu "$work/context"
buildah run --isolation chroot "$(buildah from moetier:cpu)" -- sh -c 'id -u; moetier version; vllm --version'
