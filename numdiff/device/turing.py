"""PTX of kernels that are written for sm_80, for Turing (sm_75) and cards that act as one.

Turing has tensor cores and `ldmatrix`, but neither `cp.async` nor products of 16 of k. A kernel
keeps its text; `for_turing` replaces these instructions in its PTX:

    cp.async.*.shared.global        a load into registers and a store to shared memory: the data
                                    are there when the thread continues
    cp.async.commit_group, wait_…   nothing
    mma.m16n8k16 of float16         two mma.m16n8k8, on the first and on the second 8 of k
    cvt.f16x2.f32                   two conversions and a move

The barriers of a pipeline stay where they are, so its other threads see a tile as before. ptxas
moves the loads of several copies before their stores, and a multiprocessor hides what remains of
the latency by its other blocks. A copy that is filled up with zeros reads all of its bytes or none.
A product of 16 of k is rounded twice instead of once.

SOURCE  PTX ISA, sections 9.7.14.5 (mma, "Target ISA Notes") and 9.7.9.25.3 (cp.async).
"""

import re

ASYNC_COPIES = (8, 0)  # the first compute capability with cp.async and mma.m16n8k16

COPY = re.compile(
    r"cp\.async\.c[ag]\.shared\.global \[([^]]+)\], \[([^]]+)\], (\d+)(?:, (%\w+|\d+))?;"
)
GROUPS = re.compile(r"cp\.async\.(?:commit_group|wait_all|wait_group \d+);")
PRODUCT = re.compile(
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32 "
    r"\{(.+?)\}, \{(.+?), (.+?), (.+?), (.+?)\}, \{(.+?), (.+?)\}, \{(.+?)\};"
)


PACKED = re.compile(r"cvt\.rn\.f16x2\.f32 ([^,]+), ([^,]+), ([^;]+);")
UNPACKED = r"{ .reg .b16 low, high; cvt.rn.f16.f32 high, \2; cvt.rn.f16.f32 low, \3; mov.b32 \1, {low, high}; }"


def needs_rewriting(capability):
    """Whether a card of this compute capability lacks the instructions of sm_80."""
    return tuple(capability[:2]) < ASYNC_COPIES


def for_turing(ptx):
    """The PTX text with the instructions that sm_75 has."""
    ptx = PRODUCT.sub(_two_products, COPY.sub(_load_and_store, ptx))
    return GROUPS.sub("", PACKED.sub(UNPACKED, ptx))


def _load_and_store(found):
    to, source, size, count = found.groups()
    words = [f"w{i}" for i in range(int(size) // 4)]
    vector = {1: "", 2: ".v2", 4: ".v4"}[len(words)]
    names = f"{{{', '.join(words)}}}" if vector else words[0]
    lines = [f".reg .b32 {', '.join(words)};"]
    load = f"ld.global{vector}.b32 {names}, [{source}];"
    if count is not None:
        lines += [".reg .pred p;", f"setp.ne.u32 p, {count}, 0;"]
        lines += [f"mov.b32 {word}, 0;" for word in words]
        load = f"@p {load}"
    return f"{{ {' '.join(lines)} {load} st.shared{vector}.b32 [{to}], {names}; }}"


def _two_products(found):
    d, *a, b0, b1, c = found.groups()
    product = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
    middle = "{t0, t1, t2, t3}"
    return (
        f"{{ .reg .f32 t0, t1, t2, t3; {product} {middle}, {{{a[0]}, {a[1]}}}, {{{b0}}}, {{{c}}}; "
        f"{product} {{{d}}}, {{{a[2]}, {a[3]}}}, {{{b1}}}, {middle}; }}"
    )
