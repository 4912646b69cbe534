"""The memory plan, checked byte by byte and step by step by a simulation that is independent of the planner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whet.builder.memory import planner
from whet.builder.memory.planner import Block, Use, find_best_placement, plan_memory
from whet.errors import MemoryLimitError
from whet.runtime.memory import ALIGNMENT


@st.composite
def programs(draw):
    """Random layers over random values: some in place on a value without later readers, some with scratch."""
    inputs = {f"in{i}": draw(st.integers(0, 400)) for i in range(draw(st.integers(1, 2)))}
    sizes = dict(inputs)
    raw = []
    for step in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=3, unique=True))
        name = f"v{step}"
        sizes[name] = draw(st.integers(0, 400))
        raw.append((reads, name, draw(st.booleans()), draw(st.sampled_from([0, 0, 64, 100]))))
    outputs = draw(st.lists(st.sampled_from([name for _, name, _, _ in raw]), min_size=1, max_size=2, unique=True))
    uses = []
    for step, (reads, name, wish, scratch) in enumerate(raw):
        first = reads[0]
        dead = first not in inputs and first not in outputs and name not in outputs
        dead = dead and not any(first in later for later, *_ in raw[step + 1 :])
        inplace = ()
        if wish and dead:
            sizes[name] = sizes[first]
            inplace = ((0, 0),)
        uses.append(Use(f"layer{step}", tuple((r, sizes[r]) for r in reads), ((name, sizes[name]),), inplace, scratch))
    return uses, inputs, outputs


@settings(max_examples=300)
@given(programs())
def test_no_byte_has_two_owners(program):
    uses, inputs, outputs = program
    plan = plan_memory(uses, inputs, outputs)
    owner: dict[int, str] = {}

    def bytes_of(name):
        return range(plan.offsets[name], plan.offsets[name] + plan.sizes[name])

    def write(name):
        for byte in bytes_of(name):
            assert 0 <= byte < plan.total
            owner[byte] = name

    for name in inputs:
        write(name)
    for use in uses:
        for name, _ in use.inputs:
            assert all(owner.get(b) == name for b in bytes_of(name)), f"{use.layer} reads %{name} after it was overwritten"
        scratch = range(plan.scratch_offset, plan.scratch_offset + use.scratch)
        written = set(bytes_of(use.outputs[0][0]))
        shared = {use.inputs[i][0] for i, _ in use.inplace}
        for name, _ in use.inputs:
            if name not in shared:
                assert not written & set(bytes_of(name)), f"{use.layer} writes over its input %{name} while it reads it"
            assert not set(scratch) & set(bytes_of(name))
        assert not written & set(scratch)
        for b in scratch:
            owner[b] = "scratch"
        write(use.outputs[0][0])
    for name in (*inputs, *outputs):  # users may read both after the run
        assert all(owner.get(b) == name for b in bytes_of(name)), f"%{name} was overwritten by the end"


@settings(max_examples=150)
@given(programs())
def test_offsets_are_aligned_and_in_place_pairs_share(program):
    uses, inputs, outputs = program
    plan = plan_memory(uses, inputs, outputs)
    assert all(at % ALIGNMENT == 0 for at in plan.offsets.values())
    for use in uses:
        for i, o in use.inplace:
            assert plan.offsets[use.inputs[i][0]] == plan.offsets[use.outputs[o][0]]


def chain(n: int, size: int) -> list[Use]:
    names = ["x", *(f"v{i}" for i in range(n))]
    return [Use(f"l{i}", ((names[i], size),), ((names[i + 1], size),)) for i in range(n)]


def test_a_chain_needs_two_buffers_besides_input_and_output():
    plan = plan_memory(chain(10, 640), {"x": 640}, ["v9"])
    assert plan.total == 4 * 640


def test_exceeded_limits_are_refused_with_the_sizes():
    uses = [Use("l0", (("x", 1 << 20),), (("y", 2 << 20),), scratch=3 << 20)]
    with pytest.raises(MemoryLimitError, match=r"arena needs 6.00 MiB, memory_limit\['arena'\] allows 1.00 MiB.*%y 2.00 MiB"):
        plan_memory(uses, {"x": 1 << 20}, ["y"], limits={"arena": 1 << 20})
    with pytest.raises(MemoryLimitError, match=r"scratch .* 3.00 MiB, memory_limit\['workspace'\] allows 1.00 MiB"):
        plan_memory(uses, {"x": 1 << 20}, ["y"], limits={"workspace": 1 << 20})


@st.composite
def joined_programs(draw):
    """Layers that produce values, and Concats of them as views: nested, of prefixes, next to copies; parts are read after the Concat as well."""
    inputs, sizes, wholes = {"in": 128}, {"in": 128}, {}
    uses, taken = [], set()
    for step in range(draw(st.integers(3, 12))):
        free = [n for n in sizes if n != "in" and n not in taken]
        if len(free) >= 2 and draw(st.booleans()):
            parts = draw(st.lists(st.sampled_from(free), min_size=2, max_size=3, unique=True))
            name, shifts = f"j{step}", [sum(sizes[p] for p in parts[:k]) for k in range(len(parts))]
            sizes[name], wholes[name] = sum(sizes[p] for p in parts), parts
            taken.update(parts)
            pairs = tuple((k, 0) for k in range(len(parts)))
            uses.append(Use(name, tuple((p, sizes[p]) for p in parts), ((name, sizes[name]),), pairs, 0, tuple(shifts)))
        else:
            reads = draw(st.lists(st.sampled_from(sorted(sizes)), min_size=1, max_size=2, unique=True))
            name = f"v{step}"
            sizes[name] = 64 * draw(st.integers(1, 3))
            uses.append(Use(name, tuple((r, sizes[r]) for r in reads), ((name, sizes[name]),), (), draw(st.sampled_from([0, 64]))))
    outputs = [draw(st.sampled_from([n for n in sizes if n not in taken and n != "in"]))]
    return uses, inputs, outputs, wholes


@settings(max_examples=300)
@given(joined_programs())
def test_every_byte_of_parts_and_concats_is_preserved(program):
    uses, inputs, outputs, wholes = program
    plan = plan_memory(uses, inputs, outputs)
    memory: dict[int, tuple[str, int]] = {}

    def written(name):
        """The expected bytes of a value: those of its parts, concatenated, or its own."""
        if name in wholes:
            return [b for part in wholes[name] for b in written(part)]
        return [(name, i) for i in range(plan.sizes[name])]

    def write(name):
        memory.update(zip(range(plan.offsets[name], plan.offsets[name] + plan.sizes[name]), written(name), strict=True))

    def check(name):
        at = plan.offsets[name]
        assert 0 <= at <= plan.total - plan.sizes[name]
        assert [memory.get(at + i) for i in range(plan.sizes[name])] == written(name), f"%{name} is not what was written"

    write("in")
    for use in uses:
        for name, _ in use.inputs:
            check(name)
        if use.shifts:
            check(use.layer)  # a view moves nothing, and its bytes are present
            continue
        for i in range(plan.scratch_offset, plan.scratch_offset + use.scratch):
            memory[i] = ("scratch", i)
        write(use.outputs[0][0])
        for name, _ in use.inputs:
            check(name)  # writing the output did not change the inputs
    for name in (*inputs, *outputs):
        check(name)


#: (name, 64-byte units, first and last step) of blocks, for which one order of placement alone is the best, and the units that it needs
BEST_PLACEMENTS = {
    "by size": ([("a", 4, 4, 6), ("b", 2, 2, 5), ("c", 1, 3, 6), ("d", 3, 6, 6)], 8),
    "by size times interval": ([("a", 2, 0, 4), ("b", 1, 3, 6), ("c", 5, 1, 2), ("d", 5, 6, 8)], 7),
    "by first step": ([("a", 4, 6, 7), ("b", 1, 1, 3), ("c", 1, 2, 6), ("d", 4, 0, 1)], 5),
    "by interval": ([("a", 4, 3, 6), ("b", 6, 2, 4), ("c", 5, 3, 7), ("d", 6, 0, 2)], 15),
}


@pytest.mark.parametrize("order", BEST_PLACEMENTS)
def test_each_order_of_placement_is_the_best_for_some_blocks(order):
    blocks, most = BEST_PLACEMENTS[order]
    assert find_best_placement([Block(name, 64 * units, first, last) for name, units, first, last in blocks])[1] == 64 * most


def test_blocks_of_a_single_step_count_by_their_size_too():
    """No placement needs less than the bytes that are live at once: 25 units at step 3."""
    blocks = [("a", 4, 3, 7), ("b", 5, 6, 7), ("c", 9, 0, 1), ("d", 8, 2, 3), ("e", 5, 1, 3), ("f", 2, 1, 1), ("g", 3, 6, 7), ("h", 8, 1, 4)]
    assert find_best_placement([Block(name, 64 * units, first, last) for name, units, first, last in blocks])[1] == 64 * 25


def test_tensors_that_cannot_share_bytes_are_named():
    """%x and %y have the same bytes, and %u would be in place of both at two offsets."""
    uses = [Use("l", (("x", 64),), (("y", 64),), ((0, 0),)), Use("o", (("y", 64), ("x", 64)), (("u", 64),), ((0, 0), (1, 0)), shifts=(0, 64))]
    with pytest.raises(AssertionError, match="'o' wants %x and %u to share bytes that lie elsewhere already"):
        plan_memory(uses, {"x": 64}, ["u"])


def test_of_equally_good_placements_that_by_first_step_precedes_that_by_interval():
    blocks = [Block("a", 320, 4, 8), Block("b", 320, 0, 4), Block("c", 256, 3, 4), Block("d", 384, 5, 5)]
    assert find_best_placement(blocks) == ({"b": 0, "c": 320, "a": 576, "d": 0}, 896)


@pytest.mark.parametrize(("base", "each", "best"), [(1, 1, True), (0, 1, False), (4, 0, False), (5, 0, True)])
def test_with_too_many_overlaps_blocks_are_placed_by_first_step_alone(base, each, best, monkeypatch):
    """Four blocks of which five pairs overlap: the limit is a number of pairs and so many more per block."""
    monkeypatch.setattr(planner, "OVERLAPS", base)
    monkeypatch.setattr(planner, "OVERLAPS_PER_BLOCK", each)
    blocks, most = BEST_PLACEMENTS["by size"]
    assert (find_best_placement([Block(name, 64 * units, first, last) for name, units, first, last in blocks])[1] == 64 * most) is best
