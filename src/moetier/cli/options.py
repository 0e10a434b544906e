"""Options of `moetier serve`, shared with verbs that start a server too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="Checkpoint folder: config.json and *.safetensors.")]
StoreFolder = Annotated[Path, typer.Option("--store", help="Folder of the model's expert store.")]
OwnStore = Annotated[
    Path | None, typer.Option("--store", help="Folder of the model's expert store (default: MODEL-store beside it).")
]
BuildStore = Annotated[bool, typer.Option("--build-store", help="Build the store first if it is not there.")]
DramRecords = Annotated[
    str | None,
    typer.Option(help="Experts of each layer in DRAM: a number, a share such as 25%, or auto (default: planned)."),
]
Slots = Annotated[
    str | None, typer.Option(help="Experts of each layer in GPU memory: a number, 25%, or auto (default: planned).")
]
Reserve = Annotated[
    int | None,
    typer.Option(
        "--context-reserve",
        metavar="TOKENS",
        min=0,
        help="Serve the model's whole window less this many tokens; without it, 32768 tokens or all it has.",
    ),
]
LongestGap = Annotated[
    float | None,
    typer.Option(
        metavar="MS",
        min=1,
        max=1e6,
        help="Milliseconds that running streams shall wait for a token at most while a prompt enters: it decides how "
        "many tokens of the prompt go into a step (default: 200).",
    ),
]
Host = Annotated[str, typer.Option(help="Address to listen on; beyond loopback an API key is needed.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        help="Key that clients must give. Every user of this machine sees it in the process list: prefer "
        "--api-key-file, or VLLM_API_KEY in the environment."
    ),
]
ApiKeyFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File of keys, one a line: clients must give one of them.")
]
KvCacheGib = Annotated[
    float | None,
    typer.Option(
        min=0.01, max=1e6, help="GiB of KV cache, on the CPU or beside --slots (default: planned, 1 at least)."
    ),
]
DrainSeconds = Annotated[int, typer.Option(min=0, max=86_400, help="Seconds for requests in flight after Ctrl-C.")]
Assignments = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Another setting, such as threads=14; docs/serve.md has all; repeat for more.",
    ),
]
IdentityCheck = Annotated[
    int, typer.Option(min=0, max=100_000, help="Random layer calls compared through every path at start; 0: none.")
]
HaltOnCorruption = Annotated[
    bool,
    typer.Option(
        "--halt-on-corruption",
        help="End the server once a check while it serves finds that bytes or arithmetic were wrong.",
    ),
]
Record = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Record a routing trace to this new file (`moetier trace`).")
]
UsageStats = Annotated[bool, typer.Option("--usage-stats", help="Let vLLM report usage statistics.")]
LogFile = Annotated[
    Path | None, typer.Option(help="Where vLLM's own log goes (default: serve-PORT.log in the user's state folder).")
]
SkipSupportCheck = Annotated[
    bool,
    typer.Option(
        "--skip-support-check",
        help="Go on although this vLLM does not know the model, or is known to fail with it here.",
    ),
]
Explain = Annotated[
    bool, typer.Option("--explain", help="Before starting, say what was derived and what a step is expected to take.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="vLLM's own log goes to the terminal.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print where everything lives as one JSON object on stdout.")]
