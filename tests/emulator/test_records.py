"""Records in every memory space: aligned and packed, nested, with arrays in them, as elements and
as whole fields."""

import numpy as np
import pytest
from numba import cuda, from_dtype

from numdiff.emulator import Emulator, KernelFault

INNER = [("x", np.int16), ("y", np.float32, 2)]
FIELDS = [
    ("a", np.int8),
    ("b", np.float32),
    ("c", np.complex128),
    ("n", INNER),
    ("v", np.uint16, (2, 3)),
    ("d", np.bool_),
]
PACKED = np.dtype(
    [(name, np.dtype(kind) if name == "n" else kind, *shape) for name, kind, *shape in FIELDS]
)
ALIGNED = np.dtype(
    [
        (name, np.dtype(kind, align=True) if name == "n" else kind, *shape)
        for name, kind, *shape in FIELDS
    ],
    align=True,
)
DTYPES = pytest.mark.parametrize("dtype", [PACKED, ALIGNED], ids=["packed", "aligned"])
CHECKS = pytest.mark.parametrize("checks", [True, False], ids=["checked", "unchecked"])


def records(dtype, n=4):
    r = np.zeros(n, dtype)
    for i in range(n):
        r[i] = (i - 2, i / 4, i + 2j, (-i, [i, 2 * i]), np.arange(6).reshape(2, 3) * i, i % 2)
    return r


def changed(dtype, n=4):
    """What the kernels below make of `records`."""
    r = records(dtype, n)
    for i in range(n):
        r[i]["a"] += 3
        r[i]["b"] *= 2
        r[i]["c"] += 1j
        r[i]["n"]["x"] -= 1
        r[i]["n"]["y"][1] = r[i]["b"]
        r[i]["v"][1, 2] = 60000 + i
        r[i]["d"] = not r[i]["d"]
    return r


@cuda.jit(device=True)
def change(r, i):
    r[i].a += 3
    r[i]["b"] *= 2
    r[i].c += 1j
    r[i].n.x -= 1
    r[i]["n"]["y"][1] = r[i].b
    r[i].v[1, 2] = 60000 + i
    r[i].d = not r[i].d


@cuda.jit(device=True)
def change_fields(r, i):
    r.a[i] += 3
    r["b"][i] *= 2
    r.c[i] += 1j
    r.n.x[i] -= 1
    r["n"]["y"][i, 1] = r.b[i]
    r.v[i, 1, 2] = 60000 + i
    r.d[i] = not r.d[i]


def in_global(r, out):
    change(r, cuda.threadIdx.x)
    out[cuda.threadIdx.x] = r[cuda.threadIdx.x]


def by_fields(r, out):
    change_fields(r, cuda.threadIdx.x)
    out[cuda.threadIdx.x] = r[cuda.threadIdx.x]


def kernels_of(dtype):
    kind = from_dtype(dtype)
    table = records(dtype)

    def in_shared(r, out):
        tile = cuda.shared.array(4, dtype=kind)
        i = cuda.threadIdx.x
        tile[i] = r[i]
        change(tile, i)
        out[i] = tile[i]

    def in_local(r, out):
        own = cuda.local.array(2, dtype)
        own[1] = r[cuda.threadIdx.x]
        change_fields(own, 1)
        own.v[1, 1, 2] += cuda.threadIdx.x - 1
        out[cuda.threadIdx.x] = own[1]

    def of_constants(r, out):
        constants = cuda.const.array_like(table)
        i = cuda.threadIdx.x
        out[i] = constants[i]
        out[i].a = constants.a[i] + 3
        change(r, i)
        out[i] = r[i]

    return {
        "in_global": in_global,
        "by_fields": by_fields,
        "in_shared": in_shared,
        "in_local": in_local,
        "of_constants": of_constants,
    }


@DTYPES
@CHECKS
@pytest.mark.parametrize(
    "name", ["in_global", "by_fields", "in_shared", "in_local", "of_constants"]
)
def test_every_kind_of_field_in_every_memory(dtype, checks, name):
    out = np.zeros(4, dtype)
    machine = Emulator(checks=checks, float64=True)
    machine.launch(cuda.jit(kernels_of(dtype)[name]), 1, 4, records(dtype), out)
    assert out.tobytes() == changed(dtype).tobytes() or all(
        np.array_equal(out[field], changed(dtype)[field]) for field in dtype.names
    )


@DTYPES
def test_accesses_of_fields_are_checked(dtype):
    kind = from_dtype(dtype)

    def missing_barrier(r):
        tile = cuda.shared.array(32, kind)
        i = cuda.threadIdx.x
        tile[i].b = i
        r[i % 4].b = tile[31 - i].b + tile[i].n.x

    def outside(r):
        r.v[4, 0, 0] = 1

    with pytest.raises(KernelFault) as caught:
        Emulator(float64=True).launch(cuda.jit(missing_barrier), 1, 32, records(dtype))
    assert {f.kind for f in caught.value.faults} == {"race", "uninitialised"}
    with pytest.raises(
        KernelFault, match=r"writes r.v\[4, 0, 0\]: index 4 is outside of axis 0, whose length is 4"
    ):
        Emulator().launch(cuda.jit(outside), 1, 1, records(dtype))


@DTYPES
def test_atomics_on_fields(dtype):
    """A GPU's atomics need an address that is a multiple of their size."""

    def add(r):
        cuda.atomic.add(r.b, 1, 0.5)
        cuda.atomic.max(r["b"], 2, 7)

    r = records(dtype)
    if dtype is PACKED:
        with pytest.raises(
            KernelFault, match="alignment: atomically changes r.b of float32, whose address"
        ):
            Emulator().launch(cuda.jit(add), 1, 2, r)
    else:
        Emulator().launch(cuda.jit(add), 1, 2, r)
        assert r["b"].tolist() == [0, 1.25, 7, 0.75]


def test_an_unknown_field():
    def kernel(r):
        r[0].b = r.missing[0]

    with pytest.raises(
        KernelFault, match="r has no field missing: its fields are a, b, c, n, v, d"
    ):
        Emulator().launch(cuda.jit(kernel), 1, 1, records(ALIGNED))
