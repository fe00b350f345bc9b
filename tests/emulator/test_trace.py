"""What a trace says of the order in which things happen, and the forms in which it can be read."""
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from numba import cuda
from PIL import Image

from numdiff import emulator
from numdiff.device.mbarrier import fence_barrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait, smem_u32
from numdiff.device.tensor_map import tensor_map
from tests.emulator.kernels_mma import THREADS as MMA_THREADS
from tests.emulator.kernels_mma import TILE, matmul_mma_kernel
from tests.emulator.probes.hopper_gemm import BK, BM, make_gemm
from tests.emulator.probes.hopper_gemm import THREADS as GEMM_THREADS

float32, uint32 = np.float32, np.uint32


def line_of(kernel, text):
    """ "file:line" of the only line of a test's kernel that contains `text`."""
    code = kernel.py_func.__code__
    with open(code.co_filename, encoding="utf-8") as file:
        lines = file.read().splitlines()
    last = max(line for _, _, line in code.co_lines() if line)
    (found,) = [k + 1 for k in range(code.co_firstlineno - 1, last) if text in lines[k]]
    return f"test_trace.py:{found}"


# Barriers -------------------------------------------------------------------------------------------------------------

@cuda.jit
def uneven(x, y):
    t = cuda.threadIdx.x
    total = float32(0)
    if t >= 32:
        for k in range(20):
            total += x[k]
    cuda.syncthreads()
    y[t] = total + x[t]
    cuda.syncthreads()


def test_who_comes_first_waits_for_who_comes_last():
    tracer = emulator.trace(uneven, 1, 64, np.ones(64, float32), np.zeros(64, float32))
    first, last, *second = tracer.of("barrier")
    assert (first.row, last.row) == ("warp 0", "warp 1")
    assert first.lanes == last.lanes == 32  # what the lanes of a warp do together is one event
    assert first.place == last.place != second[0].place
    assert first.place.startswith("test_trace.py:")
    assert first.end == last.end == last.start + 1  # they meet a tick after the last has come
    assert last.start - first.start == 20 * 2  # a load and an addition in each turn of the loop
    assert [e.end for e in second] == [first.end + 4] * 2  # load x[t], add, store y[t], meet
    assert not tracer.of("wait")
    assert tracer.ends == {(0, (0, 0, 0)): {0: second[0].end, 1: second[0].end}}


@cuda.jit
def tiled(a, b, c):
    tile_a = cuda.shared.array((8, 8), float32)
    tile_b = cuda.shared.array((8, 8), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    row, column = cuda.blockIdx.y * 8 + y, cuda.blockIdx.x * 8 + x
    total = float32(0)
    for k0 in range(0, a.shape[1], 8):
        tile_a[y, x] = a[row, k0 + x]
        tile_b[y, x] = b[k0 + y, column]
        cuda.syncthreads()  # loaded
        for k in range(8):
            total += tile_a[y, k] * tile_b[k, x]
        cuda.syncthreads()  # used
    c[row, column] = total


def trace_tiled(**options):
    a, b, c = np.ones((16, 24), float32), np.ones((24, 16), float32), np.zeros((16, 16), float32)
    tracer = emulator.trace(tiled, (2, 2), (8, 8), a, b, c, **options)
    assert np.all(c == 24)
    return tracer


def test_the_barriers_of_a_tiled_matmul():
    tracer = trace_tiled()
    assert len(tracer.of("barrier")) == 4 * 2 * 3 * 2  # blocks, warps, tiles, barriers of a tile
    for y in range(2):
        for x in range(2):
            mine = tracer.of("barrier", "warp 1", (x, y, 0))
            used = line_of(tiled, "# used")
            assert [e.place for e in mine] == [line_of(tiled, "# loaded"), used] * 3
            assert [e.end for e in mine] == sorted({e.end for e in mine})
            # between "loaded" and "used": 8 turns of two loads, a product and a sum
            assert [used.start - loaded.end for loaded, used in zip(mine[::2], mine[1::2], strict=True)] == [8 * 4] * 3


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_a_trace_does_not_depend_on_the_order_of_threads(order):
    assert trace_tiled(order=order).events == trace_tiled().events


def test_a_timeline_as_text():
    lines = trace_tiled().timeline(block=(1, 0, 0)).splitlines()
    assert lines[0] == "tiled, grid (2, 2, 1), block (8, 8, 1): block (1, 0, 0)"
    assert len(lines) == 1 + 2 * 3  # both warps in one line
    assert "warps 0-1 (64 lanes)" in lines[1] and lines[1].endswith(line_of(tiled, "# loaded"))
    assert sum("block (" in line and line.startswith("tiled") for line in trace_tiled().timeline().splitlines()) == 4


# mbarriers ------------------------------------------------------------------------------------------------------------

@cuda.jit
def hand_over(x, y):
    bars = cuda.shared.array(1, np.uint64)
    mine = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    bar = smem_u32(bars)
    if t == 0:
        mbarrier_init(bar, uint32(16))
        fence_barrier_init()
    cuda.syncthreads()
    if t >= 32:
        mine[t] = x[t] * x[t]
        if t % 2 == 0:
            mbarrier_arrive(bar)
    else:
        mbarrier_wait(bar, uint32(0))
        y[t] = x[t]


def test_lanes_that_arrive_and_wait():
    tracer = emulator.trace(hand_over, 1, 64, np.ones(64, float32), np.ones(64, float32))
    (arrive,), (phase,), (wait,) = tracer.of("arrive"), tracer.of("phase"), tracer.of("wait")
    assert (arrive.row, arrive.lanes, arrive.place) == ("warp 1", 16, line_of(hand_over, "mbarrier_arrive(bar)"))
    assert (wait.row, wait.lanes, wait.text) == ("warp 0", 32, "bars[0], parity 0")
    assert phase.row == "mbarriers" and phase.text == "bars[0]: phase 0 ends"
    assert wait.start < arrive.start <= phase.start == wait.end
    order = [e.kind for e in tracer.events]
    assert order.index("arrive") < order.index("phase") < order.index("wait")


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


def test_a_wait_without_end_is_on_the_timeline():
    tracer = emulator.Tracer()
    with pytest.raises(emulator.KernelFault, match="deadlock"):
        emulator.Emulator(tracer=tracer).launch(waits_for_nothing, 1, 32, np.ones(32, float32))
    (wait,) = tracer.of("wait")
    assert wait.text == "bars[0], parity 0, for ever" and wait.lanes == 32
    assert len(tracer.of("arrive")) == 1 and not tracer.of("phase")


# Copies and matrix instructions ---------------------------------------------------------------------------------------

STAGES, K_TILES = 2, 3


@pytest.fixture(scope="module")
def gemm():
    """The Hopper GEMM: a producer warp, two warpgroups that multiply, two stages for three tiles of k."""
    rng = np.random.default_rng(0)
    k, n = BK * K_TILES, 64
    a, b = (rng.standard_normal((rows, k)).astype(np.float16) for rows in (BM, n))
    c = np.zeros((BM, n), np.float16)
    kernel, shared = make_gemm(n, STAGES)
    maps = tensor_map(a, (BK, BM)), tensor_map(b, (BK, n))
    tracer = emulator.trace(kernel, 1, GEMM_THREADS, *maps, c, k, shared=shared)
    assert np.allclose(c, a.astype(float) @ b.astype(float).T, rtol=2e-3, atol=2e-2)
    return tracer


def test_copies_are_issued_then_complete_then_end_a_phase_then_a_wait(gemm):
    issued, copies = gemm.of("copy issued"), gemm.of("copy")
    assert [e.text for e in issued] == [f"map_{m}[{BK * k}, 0]" for k in range(K_TILES) for m in "ab"]
    assert [e.text for e in copies] == [e.text for e in issued]
    assert {e.row for e in issued} == {"warp 0"} and {e.row for e in copies} == {"TMA"}
    assert {e.lanes for e in issued} == {1}
    ended = {e.text.split(":")[0] + e.text.split("phase")[1]: e.end for e in gemm.of("phase")}
    for number, (start, bar) in enumerate(zip(issued, copies, strict=True)):
        tile = number // 2
        assert bar.start == start.start < bar.end and bar.place == start.place
        phase = ended[f"barriers[{tile % STAGES}] {tile // STAGES} ends"]
        assert bar.end <= phase
        waits = [e for e in gemm.of("wait") if e.text == f"barriers[{tile % STAGES}], parity {tile // STAGES}"]
        assert {w.row for w in waits} == {f"warp {w}" for w in range(4, 12)}
        assert all(w.end >= phase for w in waits)
    # and of simultaneous events, the cause is listed first
    kinds = [e.kind for e in gemm.events if e.end == copies[0].end]
    assert kinds == ["copy"] * 2 + ["phase"] + ["wait"] * 8


def test_a_wgmma_comes_after_its_tile_and_before_the_tile_is_reloaded(gemm):
    bars, copies = gemm.of("wgmma"), gemm.of("copy")
    assert len(bars) == 4 * K_TILES and {e.row for e in bars} == {"tensor cores"}
    assert {e.text for e in bars} == {"2 × m64n64k16"}  # one of each warpgroup
    bars = sorted(bars, key=lambda e: e.start)
    for tile in range(K_TILES):
        arrived = max(e.end for e in copies[2 * tile:2 * tile + 2])
        mine = bars[4 * tile:4 * tile + 4]
        assert all(arrived < e.start < e.end for e in mine)
        if tile + STAGES < K_TILES:  # the stage is loaded again when its products are complete and it is released
            again = copies[2 * (tile + STAGES)]
            released = [e for e in gemm.of("phase") if e.text == f"barriers[{STAGES + tile}]: phase 0 ends"]
            assert max(e.end for e in mine) <= released[0].end < again.start
    # the program waits for all but one group, so the groups of two tiles are under way at once
    assert bars[4].start < bars[0].end


def test_what_the_tracer_keeps_for_pictures(gemm):
    assert [c.at for c in gemm.copies] == [(BK * k, 0) for k in range(K_TILES) for _ in "ab"]
    assert gemm.products == []


@pytest.fixture(scope="module")
def mma():
    """The matmul of sm_80 with 64 × 64 of C and two tiles of k."""
    a = np.arange(TILE * 2 * TILE).reshape(TILE, -1).astype(np.float16) % 7
    c = np.zeros(TILE * TILE, np.float32)
    tracer = emulator.trace(matmul_mma_kernel, (1, 1), MMA_THREADS, a.ravel(), a.ravel(), c, TILE, TILE, 2 * TILE,
                            cc=(8, 0))
    assert np.array_equal(c.reshape(TILE, TILE), a.astype(float) @ a.astype(float).T)
    return tracer


def test_a_group_of_cp_async_completes_at_the_wait_that_covers_it(mma):
    first, second = sorted({e.end for e in mma.of("barrier")})
    for warp in range(4):
        groups = [e for e in mma.of("copy") if e.text == f"cp.async group of warp {warp}"]
        issued = [e.start for e in mma.of("copy issued", f"warp {warp}")]
        assert [e.start for e in sorted(groups, key=lambda e: e.start)] == issued
        # the wait leaves one group in flight: tile 0 is there at the first barrier, tile 1 at the second
        assert issued[0] < groups[0].end < first
        assert issued[1] < first < groups[1].end < second
    assert {e.row for e in mma.of("copy")} == {"TMA"}


def test_products_keep_their_registers(mma):
    assert len(mma.products) == 4 * 2 * 4 * 8  # warps, tiles of k, steps of 16, instructions of a step
    one = mma.products[0]
    assert (one.name, one.block, one.place.split(":")[0]) == ("mma.m16n8k16", (0, 0, 0), "kernels_mma.py")
    assert [r.shape for r in one.registers] == [(32, 4), (32, 2), (32, 4), (32, 4)]


# Forms ----------------------------------------------------------------------------------------------------------------

def test_chrome_json(gemm, tmp_path):
    gemm.save(tmp_path / "trace.json")
    data = json.loads((tmp_path / "trace.json").read_text())
    events = data["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = [(e["cat"], e["ts"], e.get("dur", 0), names[e["pid"], e["tid"]], e["args"]["where"])
             for e in events if e["ph"] in "Xi"]
    assert sorted(found) == sorted((e.kind, e.start, e.end - e.start, e.row, e.place) for e in gemm.events)
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"gemm 0, block (0, 0, 0)"}


def test_svg(gemm, tmp_path):
    gemm.save(tmp_path / "trace.svg")
    root = ElementTree.parse(tmp_path / "trace.svg").getroot()
    tag = "{http://www.w3.org/2000/svg}"
    tips = [e.text for e in root.iter(tag + "title")]
    for event in gemm.events:
        assert str(event) in tips, event
    texts = [e.text for e in root.iter(tag + "text")]
    rows = [f"warp {w}" for w in range(12)] + ["mbarriers", "TMA", "tensor cores"]
    assert [t for t in texts if t in rows] == rows
    assert {"waits at a barrier", "copy under way", "wgmma under way", "logical time"} <= set(texts)
    width, height = (float(root.get(a)) for a in ("width", "height"))
    for rect in root.iter(tag + "rect"):
        if rect.get("x"):
            assert 0 <= float(rect.get("x")) <= float(rect.get("x")) + float(rect.get("width")) <= width
            assert 0 <= float(rect.get("y")) <= float(rect.get("y")) + float(rect.get("height")) <= height


def test_png_and_other_names(gemm, tmp_path):
    gemm.save(tmp_path / "trace.png")
    with Image.open(tmp_path / "trace.png") as image:
        picture = gemm.picture()
        assert image.size == (2 * picture.width, 2 * picture.height)
        assert len(image.getcolors(1 << 20)) > 6
    gemm.save(tmp_path / "trace.txt")
    assert (tmp_path / "trace.txt").read_text().strip() == gemm.timeline()
    with pytest.raises(ValueError, match="trace.gif"):
        gemm.save(tmp_path / "trace.gif")


def test_several_launches_in_a_context():
    with emulator.trace(order="reversed") as tracer:
        tracer.machine.launch(uneven, 1, 64, np.ones(64, float32), np.zeros(64, float32))
        uneven[1, 64](np.ones(64, float32), np.zeros(64, float32))
    assert tracer.launches == [("uneven", (1, 1, 1), (64, 1, 1))] * 2
    assert [e.end for e in tracer.of(launch=0)] == [e.end for e in tracer.of(launch=1)]
    assert "block (0, 0, 0)" in tracer.timeline()
    assert emulator.trace(uneven, 1, 64, np.ones(64, float32), np.zeros(64, float32), checks=False).events
