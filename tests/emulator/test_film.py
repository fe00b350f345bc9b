"""What a film records, in which order its steps are, and what its page contains."""

import base64
import json
import re
import zlib

import numpy as np
import pytest
from numba import cuda

from numdiff import emulator
from numdiff.device.mbarrier import (
    fence_barrier_init,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    smem_u32,
)
from numdiff.device.tensor_map import tensor_map
from numdiff.emulator import reel
from numdiff.emulator.replay import LATENCY, Replay
from numdiff.emulator.rewrite import SITES
from numdiff.extras.kernel_check import run as check
from tests.conftest import exhaustive
from tests.emulator.kernels_mma import THREADS as MMA_THREADS
from tests.emulator.kernels_mma import TILE, matmul_mma_kernel
from tests.emulator.probes.hopper_gemm import BK, BM, make_gemm
from tests.emulator.probes.hopper_gemm import THREADS as GEMM_THREADS

float32, uint32 = np.float32, np.uint32
ALL = 0xFFFFFFFF


def line_of(kernel, text):
    """The number of the only line of a test's kernel that contains `text`."""
    code = kernel.py_func.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    last = max(line for _, _, line in code.co_lines() if line)
    (found,) = [k + 1 for k in range(code.co_firstlineno - 1, last) if text in lines[k]]
    return found


def replay(film, launch=-1):
    return Replay(film.launches[launch])


def lines(found, row=0):
    """[(step, line, mask)] of a warp."""
    return [(step, SITES.places[site][2], mask) for step, site, mask in found.steps[row]]


def variables(found, name, row=0):
    """[(step, lanes, values)] of a variable of a warp."""
    return [
        (g.step, g.lanes, g.values)
        for g in found.groups
        if g.kind == "let" and g.row == row and g.about[1] == name
    ]


# Lines, variables, accesses -----------------------------------------------------------------------


@cuda.jit
def branches(x, y):
    t = cuda.threadIdx.x
    total = x[t]
    for k in range(t % 2 + 1):  # the odd lanes twice
        if t < 8:
            total += float32(10)
        total += float32(k)
    y[t] = total  # all again


def test_lanes_meet_again_after_branches_and_loops():
    y = np.zeros(32, float32)
    film = emulator.trace(branches, 1, 32, np.arange(32, dtype=float32), y)
    assert np.array_equal(y[:2], [10, 22]) and not film.faults
    found = replay(film)
    first = line_of(branches, "t = cuda")
    odd, low = 0xAAAAAAAA, 0xFF
    assert [(line - first, mask) for _, line, mask in lines(found)] == [
        (0, ALL),
        (1, ALL),
        (2, ALL),
        (3, ALL),
        (4, low),
        (5, ALL),
        (2, odd),
        (3, odd),
        (4, low & odd),
        (5, odd),
        (6, ALL),
    ]
    assert [step for step, *_ in found.steps[0]] == list(range(found.length))
    (t,) = variables(found, "t")
    assert t == (0, list(range(32)), list(range(32)))
    odds = range(1, 32, 2)
    assert variables(found, "total")[-1] == (
        9,
        list(odds),
        [k + 21 if k < 8 else k + 1 for k in odds],
    )


@cuda.jit(device=True)
def half(v):
    w = v * float32(0.5)
    return w


@cuda.jit
def calls(x):
    mine = cuda.local.array(2, float32)
    t = cuda.threadIdx.x
    mine[1] = half(x[t])
    i = t
    while i < 2:
        i += 1
    x[t] = mine[1]


def test_device_functions_local_arrays_and_while_loops():
    x = np.full(32, 3, float32)
    found = replay(emulator.trace(calls, 1, 32, x))
    assert np.all(x == 1.5)
    assert variables(found, "w")[0][2] == variables(found, "mine[1]")[0][2] == [1.5] * 32
    assert {g.about[0] for g in found.groups if g.kind == "let"} == {"calls", "half"}
    header = line_of(calls, "while i")
    assert [mask for _, line, mask in lines(found) if line == header] == [ALL, 3, 1]


@cuda.jit
def shuffles(x):
    t = cuda.threadIdx.x
    v = x[t]
    v += cuda.shfl_down_sync(ALL, v, 16)
    x[t] = v


def test_a_warp_operation_takes_no_further_step():
    found = replay(emulator.trace(shuffles, 1, 32, np.arange(32, dtype=float32)))
    assert found.length == 4 and not found.waits
    assert variables(found, "v")[1] == (
        2,
        list(range(32)),
        [2 * k + 16 if k < 16 else 2 * k for k in range(32)],
    )


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_a_film_does_not_depend_on_the_order_of_threads(order):
    films = [
        replay(
            emulator.trace(
                branches, 1, 32, np.arange(32, dtype=float32), np.zeros(32, float32), order=each
            )
        )
        for each in ("forward", order)
    ]
    assert films[0].steps == films[1].steps
    assert [(g.step, g.kind, g.lanes, g.values) for g in films[0].groups] == [
        (g.step, g.kind, g.lanes, g.values) for g in films[1].groups
    ]


# Barriers -----------------------------------------------------------------------------------------


@cuda.jit
def uneven(x, y):
    t = cuda.threadIdx.x
    total = float32(0)
    if t >= 32:
        for k in range(20):
            total += x[k]
    cuda.syncthreads()
    y[t] = total


@cuda.jit
def waits_for_nothing(x):
    bars = cuda.shared.array(1, np.uint64)
    bar = smem_u32(bars)
    if cuda.threadIdx.x == 0:
        mbarrier_init(bar, uint32(33))
        fence_barrier_init()
    cuda.syncthreads()
    mbarrier_arrive(bar)
    mbarrier_wait(bar, uint32(0))
    x[cuda.threadIdx.x] = float32(0)


def test_a_wait_without_end():
    film = emulator.trace(waits_for_nothing, 1, 32, np.ones(32, float32))
    assert [fault.kind for fault in film.faults] == ["deadlock"]
    found = replay(film)
    assert not [event for event in found.phases if event[3] == "end"]
    wait = next(wait for wait in found.waits if "parity" in wait[3])
    assert "lacks 1 of 33 arrivals" in wait[3] and wait[2] == found.length and 0 in found.faults
    assert "deadlock" in unpacked(film)["launches"][0]["faults"][0]["kind"]


# Faults -------------------------------------------------------------------------------------------


@cuda.jit
def no_barrier(x, y):
    tile = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    tile[t] = x[t]
    y[t] = tile[63 - t]


def test_a_race_has_both_accesses():
    film = emulator.trace(no_barrier, 1, 64, np.ones(64, float32), np.zeros(64, float32))
    found = replay(film)
    wrote, read = line_of(no_barrier, "tile[t] ="), line_of(no_barrier, "63 - t")
    races = [(k, fault) for k, fault in enumerate(film.faults) if fault.kind == "race"]
    assert {fault.line for _, fault in races} == {wrote, read}
    for number, fault in races:
        for where, line, thread in (
            (found.faults, fault.line, fault.thread),
            (found.others, fault.others[0][1].line, fault.others[0][1].thread),
        ):
            step, row, lane = where[number]
            assert 32 * row + lane == thread[0]
            assert [at for when, at, _ in lines(found, row) if when <= step][-1] == line
    with pytest.raises(emulator.KernelFault):
        emulator.trace(
            no_barrier, 1, 64, np.ones(64, float32), np.zeros(64, float32), on_fault="raise"
        )


# Copies and matrix instructions -------------------------------------------------------------------

STAGES, K_TILES = 2, 3


@pytest.fixture(scope="module")
def gemm():
    """The Hopper GEMM: a producer warp, two warpgroups that multiply, two stages for three tiles of
    k."""
    rng = np.random.default_rng(0)
    k, n = BK * K_TILES, 64
    a, b = (rng.standard_normal((rows, k)).astype(np.float16) for rows in (BM, n))
    c = np.zeros((BM, n), np.float16)
    kernel, shared = make_gemm(n, STAGES)
    maps = tensor_map(a, (BK, BM)), tensor_map(b, (BK, n))
    film = emulator.trace(kernel, 1, GEMM_THREADS, *maps, c, k, shared=shared)
    assert (
        np.allclose(c, a.astype(float) @ b.astype(float).T, rtol=2e-3, atol=2e-2)
        and not film.faults
    )
    return film


def test_copies_land_before_their_wait_and_wgmmas_after_it(gemm):
    found, shot = replay(gemm), gemm.launches[0]
    loads = [f for f in shot.flights if f.kind == "load"]
    assert [f.text for f in loads] == [
        f"map_{m}[{BK * k}, 0]" for k in range(K_TILES) for m in "ab"
    ]
    assert [f.end - f.start for f in loads] == [LATENCY] * len(loads) and loads[0].detail[
        "box"
    ] == (BK, BM)
    assert [c.at for c in gemm.copies] == [(BK * k, 0) for k in range(K_TILES) for _ in "ab"]
    products = sorted((f for f in shot.flights if f.kind == "wgmma"), key=lambda f: f.start)
    assert len(products) == 2 * 4 * K_TILES and {f.text for f in products} == {"m64n64k16"}
    ends = {
        (name, phase): step
        for step, barrier, phase, kind, _ in found.phases
        if kind == "end"
        for name in [shot.barriers[barrier][1]]
    }
    for number, load in enumerate(loads):
        stage, phase = number // 2 % STAGES, number // 2 // STAGES
        assert load.end <= ends[f"barriers[{stage}]", phase]
    for tile in range(K_TILES):
        mine = products[8 * tile : 8 * tile + 8]
        assert all(f.start > max(load.end for load in loads[2 * tile : 2 * tile + 2]) for f in mine)
        if tile + STAGES < K_TILES:  # a stage is loaded again once its products are complete
            assert max(f.end for f in mine) < loads[2 * (tile + STAGES)].start
    accumulators = variables(found, "acc[0]", 4)
    assert accumulators and len(accumulators[-1][1]) == 32


@exhaustive
def test_a_film_of_an_mma():
    a = np.arange(TILE * 2 * TILE).reshape(TILE, -1).astype(np.float16) % 7
    film = emulator.trace(
        matmul_mma_kernel,
        (1, 1),
        MMA_THREADS,
        a.ravel(),
        a.ravel(),
        np.zeros(TILE * TILE, float32),
        TILE,
        TILE,
        2 * TILE,
        cc=(8, 0),
        checks=False,
    )
    assert [r.shape for r in film.products[0].registers] == [(32, 4), (32, 2), (32, 4), (32, 4)]
    found = replay(film)
    # warps, tiles of k, steps of 16, instructions of a step
    assert len(found.products) == 4 * 2 * 4 * 8
    groups = [f for f in film.launches[0].flights if f.kind == "cp.async"]
    assert len(groups) % 4 == 0 < len(groups) and all(f.start < f.end for f in groups)
    layouts = unpacked(film)["launches"][0]["products"]["layouts"]
    assert [[size for size, _ in fragments] for _, fragments in layouts] == [
        [[16, 16], [16, 8], [16, 8]]
    ]
    # two neighbours of a row are lane 0's register 0
    assert layouts[0][1][0][1][:3] == [[0, 0], [0, 0], [1, 0]]


# The page -----------------------------------------------------------------------------------------


def block_of(film):
    """The decompressed block of a page."""
    return zlib.decompress(base64.b64decode(re.search(r'id="data">([^<]*)<', film.html())[1]))


def unpacked(film):
    """The JSON text of a page."""
    data = block_of(film)
    return json.loads(data[12 : 12 + int.from_bytes(data[:4], "little")])


def test_the_page_names_what_it_shows(tmp_path):
    with emulator.trace() as film:
        no_barrier[1, 64](np.ones(64, float32), np.zeros(64, float32))
        uneven[2, 64](np.ones(64, float32), np.zeros(64, float32))
    film.save(tmp_path / "film.html")
    launches = unpacked(film)["launches"]
    assert [launch["kernel"] for launch in launches] == ["no_barrier", "uneven"]
    assert [len(launch["rows"]) for launch in launches] == [2, 4]
    assert launches[0]["arguments"] == ["x: float32[64]", "y: float32[64]"]
    assert launches[0]["arrays"][0]["parts"] == [["tile", "float32[64]", 0, 64, 32]]
    ((name, file, first, text),) = launches[0]["sources"]
    assert (name, file, text[0], text[1][:14]) == (
        "no_barrier",
        "test_film.py",
        "@cuda.jit",
        "def no_barrier",
    )
    assert first == no_barrier.py_func.__code__.co_firstlineno
    page = (tmp_path / "film.html").read_text(encoding="utf-8")
    # of SVG, which names it only
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://www.w3.org"}
    assert "<script src" not in page and "default-src 'none'" in page
    assert film._repr_html_().startswith("<iframe srcdoc=") and film.svg().startswith("<svg")
    with pytest.raises(ValueError, match=r"film\.gif: a film is saved as \.html"):
        film.save(tmp_path / "film.gif")
    with pytest.raises(ValueError, match="nothing to show"):
        emulator.Film().html()


def test_hostile_names_and_source_do_not_leave_the_data(tmp_path):
    name = "</script><img src=x onerror=alert(1)>"
    file = tmp_path / "<script>alert(2)<script>.py"
    file.write_text(
        "def kernel(x):\n    x[0] = 1  # </script><script>alert(3)</script> {{data}} {{script}}\n"
    )
    space = {}
    exec(compile(file.read_text(), str(file), "exec"), space)
    kernel = space["kernel"]
    kernel.__name__ = name
    film = emulator.trace(kernel, 1, 1, np.zeros(1, float32))
    page = film.html()
    assert "alert(" not in page.replace("&lt;", "") or "&lt;/script&gt;&lt;img" in page
    assert page.count("<script") == 2 and "<img" not in page and "alert(3)" not in page
    assert unpacked(film)["launches"][0]["kernel"] == name
    assert "</script>" in unpacked(film)["launches"][0]["sources"][0][3][1]
    assert "<script" not in film._repr_html_()


def test_further_blocks_are_not_recorded():
    film = emulator.trace(uneven, 9, 64, np.ones(64, float32), np.zeros(64, float32), warps=4)
    assert len(film.launches[0].blocks) == 2 and film.launches[0].count == 9


@cuda.jit
def long(x):
    t = cuda.threadIdx.x
    v = x[t]
    for _ in range(60):
        v = v * float32(0.99) + x[t]
    x[t] = v


def test_a_page_has_at_most_its_limit(monkeypatch):
    film = emulator.trace(long, 1, 64, np.random.default_rng(0).standard_normal(64).astype(float32))
    whole = len(film.html())
    empty = whole - len(re.search(r'id="data">([^<]*)<', film.html())[1])
    for share, lanes, cut in (
        (0.6, (4, 16, 32), False),
        (0.25, (16, 32), False),
        (0.06, (32,), True),
    ):
        monkeypatch.setattr(reel, "LIMIT", empty + int(share * (whole - empty)))
        (launch,) = unpacked(film)["launches"]
        assert len(film.html()) <= reel.LIMIT and launch["every"] in lanes and launch["cut"] == cut


def test_recording_stops_where_it_is_too_long(monkeypatch):
    from numdiff.emulator import film as films

    monkeypatch.setattr(films, "LINES", 500)
    film = emulator.trace(long, 1, 64, np.ones(64, float32))
    assert unpacked(film)["launches"][0]["cut"] and sum(map(len, replay(film).steps)) < 500


@exhaustive
@pytest.mark.parametrize(
    "operation, version, problem",
    [
        ("softmax", 2, "5×36"),
        ("groupnorm", 3, "float16, 1 times thirty-two channels, 2 blocks a cluster"),
        ("flash_attention", 5, "float16, legacy, HS 32, T 2, 64 queries"),
    ],
    ids=["shuffles", "a cluster", "TMA and wgmma"],
)
def test_a_film_changes_no_result(operation, version, problem):
    plain, _ = check.run_version(operation, version, problem)
    filmed, film = check.run_version(operation, version, problem, True)
    assert [a.tobytes() for a in plain.results] == [a.tobytes() for a in filmed.results]
    assert len(film.html()) < reel.LIMIT + 1
