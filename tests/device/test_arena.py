import gc
import weakref

from numdiff.device.arena import ALIGNMENT, AliasedArena, Arena, StreamArena


def make(segment=1 << 20):
    taken = []

    def take(nbytes):
        taken.append(nbytes)
        # segments touch each other, which must not join their blocks
        return (1 << 40) + sum(taken[:-1])

    return Arena(take, segment), taken


def test_same_requests_get_the_same_addresses():
    arena, taken = make()

    def step():
        a = arena.allocate(1000)
        b = arena.allocate(5000)
        addresses = [a.address, b.address]
        del a
        c = arena.allocate(200)
        addresses.append(c.address)
        del b
        d = arena.allocate(100_000)
        return [*addresses, d.address]

    assert step() == step() == step()
    assert len(taken) == 1


def test_blocks_never_overlap_and_come_back():
    arena, taken = make()
    blocks = [arena.allocate(n) for n in (1, 255, 256, 257, 10_000, 300_000)]
    ranges = sorted((b.address, b.address + b.nbytes) for b in blocks)
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:], strict=False))
    assert all(b.address % ALIGNMENT == 0 for b in blocks)
    used = sum(b.nbytes for b in blocks)
    assert arena.used_bytes == arena.peak_bytes == used
    for i in (3, 0, 5, 1, 4, 2):
        blocks[i] = None
    assert arena.used_bytes == 0 and arena.peak_bytes == used
    assert arena.allocate(1 << 20).nbytes == 1 << 20  # all joined again into the one segment
    assert len(taken) == 1


def test_segments_are_not_joined():
    arena, taken = make(1024)
    blocks = [arena.allocate(1024), arena.allocate(1024)]
    blocks.clear()
    assert len(taken) == 2
    arena.allocate(2048)
    assert len(taken) == 3


def test_a_dropped_block_is_freed_at_once_without_the_collector():
    arena, _ = make()
    gc.disable()
    try:
        block = arena.allocate(512)
        assert arena.used_bytes == 512
        del block
        assert arena.used_bytes == 0
    finally:
        gc.enable()
    assert weakref.ref(arena)() is arena


def test_what_is_not_used_is_given_back():
    arena, taken = make(1 << 20)
    kept, large = arena.allocate(1000), arena.allocate(3 << 20)
    del large
    back = []
    arena.trim(back.append)
    assert (
        back == [(1 << 40) + (1 << 20)]
        and arena.reserved_bytes == 1 << 20
        and arena.used_bytes == 1024
    )
    assert arena.allocate(256).address == kept.address + 1024 and len(taken) == 2  # in what is left
    del kept
    arena.trim(back.append)
    assert len(back) == 2 and arena.reserved_bytes == 0
    assert arena.allocate(256).nbytes == 256 and len(taken) == 3


def test_what_is_borrowed_is_used_first_and_called_in_once_it_is_free():
    outer, _ = make()
    aliased = AliasedArena(outer)
    first = aliased.allocate(512)
    assert first.arena is outer
    aliased.alias(1 << 20, 1024)
    aliased.alias((1 << 20) + 1024, 1024)  # a neighbour: arrays may span both
    wide, rest, more = aliased.allocate(1536), aliased.allocate(300), aliased.allocate(256)
    assert [wide.address, rest.address] == [1 << 20, (1 << 20) + 1536] and more.arena is outer
    assert not aliased.reclaim(1 << 20, 1024) and not aliased.reclaim((1 << 20) + 1024, 1024)
    wide = None
    assert not aliased.reclaim((1 << 20) + 1024, 1024) and aliased.reclaim(1 << 20, 1024)
    rest = None
    assert not aliased.reclaim(1 << 20, 1024)  # it is no longer aliased
    assert aliased.allocate(1024).address == (1 << 20) + 1024
    assert aliased.reclaim((1 << 20) + 1024, 1024) and aliased.allocate(256).arena is outer
    assert aliased.used_bytes == 0 and wide is rest is None


def test_a_part_in_the_middle_is_reclaimed():
    aliased = AliasedArena(make()[0])
    aliased.alias(1 << 20, 3 * 1024)
    assert aliased.reclaim((1 << 20) + 1024, 1024)
    blocks = [aliased.allocate(1024) for _ in range(3)]
    assert [block.address for block in blocks[:2]] == [1 << 20, (1 << 20) + 2048] and blocks[
        2
    ].arena is aliased.outer


def test_held_memory_is_not_reused_until_it_is_released():
    """All of it, or what was freed before a position."""
    arena, _ = make()
    early, *blocks = [arena.allocate(256) for _ in range(4)]
    addresses = [block.address for block in (early, *blocks)]
    del early  # before the arena holds: free
    arena.hold()
    assert arena.allocate(256).address == addresses[0]  # and freed at once: held
    blocks.pop(0)
    position = arena.position
    blocks.pop(0)
    assert (arena.held_since(0), arena.held_since(position)) == (
        3 * 256,
        256,
    ) and arena.used_bytes == 4 * 256
    assert arena.allocate(1).address not in addresses
    arena.let_go(position)
    assert arena.held_since(0) == arena.held_since(position) == 2 * 256  # that last one, too
    kept = [arena.allocate(256) for _ in range(2)]
    assert [block.address for block in kept] == addresses[:2]
    arena.let_go()
    assert arena.held_since(0) == 0 and arena.allocate(256).address == addresses[2]


def test_a_lane_gives_what_is_freed_to_its_own_and_all_back_when_it_is_closed():
    arena, _ = make()
    first, second = StreamArena(arena), StreamArena(arena)
    block = first.allocate(1000)
    address = block.address
    del block
    assert second.allocate(1000).address != address == first.allocate(1000).address
    both = [first.allocate(512), first.allocate(512)]  # what was one block of 1,024 bytes
    assert (
        both[0].address == address and both[1].address == address + 512 and arena.used_bytes == 2048
    )
    del both
    first.close()
    assert arena.used_bytes == 1024 and arena.allocate(1000).address == address
