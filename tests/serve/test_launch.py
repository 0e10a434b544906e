"""What a launch adds to vLLM's arguments, and what the engine says of itself once it has started."""

from pathlib import Path

import pytest

from moetier.errors import SettingsError
from moetier.launch.arguments import context_of, launch_of
from moetier.launch.command import ServeRequest, arguments
from moetier.launch.derive import Chunk
from moetier.launch.started import NAME, Started, read_started, write_started
from moetier.settings import Settings

MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 2}')
DSPARK = ("--speculative-config", '{"method": "dspark", "num_speculative_tokens": 5}')
OWN_GRAPHS = ("--max-cudagraph-capture-size", "--cudagraph-capture-sizes", "--compilation-config", "-O")


CHUNK = Chunk(8192, seconds=0.1, shortest=0.05, gap=0.2)


def launch(*extra, slots=55, chunk=CHUNK, vllm="0.32.0", on_cpu=False, given=False, **settings):
    request = ServeRequest(Path("/m"), Settings(store=Path("/s"), slots=slots, **settings), extra=extra)
    return launch_of(request, chunk, vllm, on_cpu, given)


@pytest.mark.parametrize(
    ("extra", "planned", "top"),
    [
        ((), 64, 64),
        (("--max-num-seqs", "8"), 64, 8),
        (("--max-num-seqs=32", *MTP), 96, 96),
        (("--max-num-seqs", "32", *DSPARK), 192, 192),
        (("--max-num-seqs", "1024"), 256, 256),
        (("--max-num-seqs", "100", *MTP), 255, 255),
        (MTP, 64, 63),
    ],
    ids=["nothing given", "8", "32 and MTP 2", "32 and a block of 5", "1024", "100 and MTP 2", "MTP 2"],
)
def test_graphs_cover_every_decode_batch_that_the_device_plans(extra, planned, top):
    found = launch(*extra)
    assert (found.planned_tokens, found.sizes[-1]) == (planned, top)
    words = found.arguments
    at = words.index("--cudagraph-capture-sizes") + 1
    assert words[at : at + len(found.sizes)] == tuple(map(str, found.sizes))


def test_planned_tokens_of_the_user_bound_the_graphs():
    found = launch("--max-num-seqs", "32", *MTP, planned_tokens=64, given=True)
    assert (found.planned_tokens, found.sizes[-1]) == (64, 63)
    assert any("22 to 32 sequences run without a graph" in line for line in found.lines())


def test_a_draft_longer_than_what_the_device_plans_has_no_graph():
    assert launch(*DSPARK, planned_tokens=4, given=True).sizes == ()


@pytest.mark.parametrize("option", ["--enforce-eager", "--compilation-config.mode", *OWN_GRAPHS])
def test_whoever_speaks_of_graphs_decides_about_them(option):
    assert launch(option, "0").sizes == ()


def test_without_device_slots_on_a_gpu_nothing_is_added():
    assert launch("--max-num-seqs", "4", slots=0).arguments == ()


@pytest.mark.parametrize(
    ("extra", "added"),
    [
        ((), ("--max-num-batched-tokens", "512")),
        (("--max-num-seqs", "600"), ("--max-num-batched-tokens", "600")),
        (("--max-num-batched-tokens", "99"), ()),
    ],
    ids=["the chunk", "room for all sequences", "the user's own"],
)
def test_on_the_cpu_the_chunk_is_all_that_is_added(extra, added):
    assert launch(*extra, slots=0, on_cpu=True, chunk=Chunk(512, 0.1, 0.05, 0.2)).arguments == added


def test_a_chunk_says_what_running_streams_wait():
    (line,) = [line for line in launch().lines() if "--longest-gap" in line]
    for words in ("8,192 of a prompt", "100 ms", "200 ms"):
        assert words in line
    (line,) = [line for line in launch(chunk=Chunk(256, 1.3, 1.2, 0.2)).lines() if "--longest-gap" in line]
    for words in ("1,300 ms", "more than the 200 ms", "1,200 ms"):
        assert words in line
    assert not any("--longest-gap" in line for line in launch("--max-num-batched-tokens", "4096").lines())


@pytest.mark.parametrize(
    ("vllm", "extra", "batched", "drafter"),
    [
        ("0.32.0", (), 8192, 0),
        ("0.32.0", ("--max-num-seqs", "32", *DSPARK), 8320, 128),
        ("0.33.0", ("--max-num-seqs", "32", *DSPARK), 8192, 0),
        ("0.26.0", ("--max-num-seqs", "32", *MTP), 8192, 0),
    ],
)
def test_the_drafters_tokens_come_on_top_of_the_planned_chunk(vllm, extra, batched, drafter):
    found = launch(*extra, vllm=vllm)
    assert (found.batched, found.drafter) == (batched, drafter)
    assert found.arguments[found.arguments.index("--max-num-batched-tokens") + 1] == str(batched)


def test_a_budget_of_the_user_stays_and_says_what_the_drafter_takes():
    found = launch("--max-num-batched-tokens", "4096", "--max-num-seqs", "32", *DSPARK)
    assert "--max-num-batched-tokens" not in found.arguments
    assert any("4,096 tokens in a step, 128 of them the drafter's" in line for line in found.lines())


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_budget_that_the_drafter_eats_is_refused_with_one_that_works(on_cpu):
    with pytest.raises(SettingsError, match="at least 160"):
        launch("--max-num-batched-tokens", "100", "--max-num-seqs", "32", *DSPARK, on_cpu=on_cpu)


@pytest.mark.parametrize(
    ("extra", "window", "reserve", "context"),
    [
        ((), 1_048_576, 16_384, 1_032_192),
        (("--block-size", "16"), 1000, 0, 992),
        ((), 1000, 0, 768),
        (("--max-model-len", "4096"), 100_000, None, 4096),
        ((), 100_000, None, None),
    ],
)
def test_context_is_the_window_less_the_reserve_in_whole_blocks(extra, window, reserve, context):
    assert context_of(extra, window, reserve) == context


def test_one_of_reserve_and_length():
    with pytest.raises(SettingsError, match="give one of them"):
        context_of(("--max-model-len", "4096"), 8192, 1024)


@pytest.mark.parametrize("own", [(), ("--cudagraph-capture-sizes", "1", "2"), ("--max-cudagraph-capture-size=8",)])
def test_vllm_hears_of_graph_sizes_once(own):
    request = ServeRequest(Path("/m"), Settings(store=Path("/s"), slots=55), extra=own)
    request = ServeRequest(
        request.model, request.settings, extra=own, derived=launch_of(request, CHUNK, "0.32.0", False).arguments
    )
    words = arguments(request, on_cpu=False)
    sizes, most = words.count("--cudagraph-capture-sizes"), words.count("--max-cudagraph-capture-size")
    assert (sizes, most) in ((1, 0), (0, 1))


STARTED = Started(kv_bytes=4 << 30, blocks=7_676, blocks_per_request=7_386, context=1_032_192, device_bytes=30 << 30)


def test_kv_is_said_as_bytes_blocks_and_requests_at_full_context():
    lines = list(STARTED.lines(planned_device_bytes=31 << 30))
    assert lines == [
        "KV cache: 4.00 GiB, 7,676 blocks; a request of 1,032,192 tokens takes 7,386: 1.039 such requests at a time",
        "device memory in use: 30.0 GiB (31.0 GiB planned)",
    ]


def test_what_the_engine_says_reaches_the_launcher(tmp_path):
    assert read_started(tmp_path) is None
    write_started(tmp_path, STARTED)
    assert read_started(tmp_path) == STARTED
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"kv_bytes": 1}', "null"])
def test_another_file_says_nothing(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    assert read_started(tmp_path) is None
