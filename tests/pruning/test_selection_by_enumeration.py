"""The parts of the selection under a budget against enumeration of all states: elimination, tables, rounding, exchanges and the search itself."""

from itertools import product

import numpy as np
import pytest

from whet.errors import PruneError
from whet.network import parse_network
from whet.pruning import branches, groups
from whet.pruning.costs import Costs
from whet.pruning.dual import Search
from whet.pruning.elimination import Elimination, Swept
from whet.pruning.knapsack import choose_within
from whet.pruning.rounding import descend, exchange, fill_budget, find_steps, round_to_budget, step_down
from whet.pruning.tables import Tables

INF = float("inf")

NESTED = """network n source
in %x: f32[N,3,4,4]
const %w0: f32[3,3,1,1] = seed(1)
const %w1: f32[4,3,1,1] = seed(2)
const %w2: f32[3,4,1,1] = seed(3)
const %w3: f32[3,3,1,1] = seed(4)
const %w4: f32[2,3,1,1] = seed(5)
%a: f32[N,3,4,4] = Conv(%x, %w0)
%b: f32[N,4,4,4] = Conv(%a, %w1)
%c: f32[N,3,4,4] = Conv(%b, %w2)
%inner: f32[N,3,4,4] = Add(%a, %c)
%d: f32[N,3,4,4] = Conv(%inner, %w3)
%e: f32[N,3,4,4] = Relu(%d)
%outer: f32[N,3,4,4] = Add(%inner, %e)
%y: f32[N,2,4,4] = Conv(%outer, %w4)
out %y
"""

DEEP = """network n source
in %x: f32[N,3,4,4]
const %w0: f32[4,3,1,1] = seed(1)
const %w1: f32[6,4,1,1] = seed(2)
const %w2: f32[5,6,1,1] = seed(3)
const %w3: f32[4,5,1,1] = seed(4)
const %w4: f32[2,4,1,1] = seed(5)
%a: f32[N,4,4,4] = Conv(%x, %w0)
%b: f32[N,6,4,4] = Conv(%a, %w1)
%c: f32[N,5,4,4] = Conv(%b, %w2)
%d: f32[N,4,4,4] = Conv(%c, %w3)
%s: f32[N,4,4,4] = Add(%a, %d)
%y: f32[N,2,4,4] = Conv(%s, %w4)
out %y
"""


def random_plan(seed):
    """Sizes, scopes that contain every variable, and a table of integers for each scope."""
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(1, 4, rng.integers(1, 6))]
    scopes = [(v,) for v in range(len(sizes))]
    scopes += [tuple(sorted({int(v) for v in rng.integers(0, len(sizes), rng.integers(1, 4))})) for _ in range(4)]
    return sizes, scopes, [rng.integers(0, 9, [sizes[v] for v in s]).astype(float) for s in scopes]


def summed(scopes, tables, x):
    return sum(float(t[tuple(x[v] for v in s)]) for s, t in zip(scopes, tables, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_elimination_finds_the_smallest_sum_and_what_each_value_adds(seed):
    sizes, scopes, tables = random_plan(seed)
    plan = Elimination(sizes, scopes)
    swept = plan.run(tables)
    states = list(product(*(range(n) for n in sizes)))
    least = min(summed(scopes, tables, x) for x in states)
    assert plan.exact
    assert sorted(plan.order) == list(range(len(sizes)))
    assert swept.least == least
    assert summed(scopes, tables, swept.values()) == least
    rng, x, fixed = np.random.default_rng(seed), [0] * len(sizes), {}
    before = least
    for n in range(len(sizes)):
        v = plan.order[-1 - n]
        regrets = swept.regrets(n, x)
        best = [min(summed(scopes, tables, y) for y in states if y[v] == k and all(y[u] == f for u, f in fixed.items())) for k in range(sizes[v])]
        assert (regrets + before).tolist() == best
        x[v] = fixed[v] = int(rng.integers(sizes[v]))
        before = best[x[v]]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("most", [3, 9, 10**9])
def test_small_buckets_give_a_lower_bound(seed, most):
    sizes, scopes, tables = random_plan(seed)
    plan = Elimination(sizes, scopes, most)
    least = min(summed(scopes, tables, x) for x in product(*(range(n) for n in sizes)))
    found = plan.run(tables)
    assert found.least <= least
    if plan.exact:
        assert found.least == least
    assert summed(scopes, tables, found.values()) >= least


def test_a_sum_of_exactly_the_largest_size_is_not_split():
    """The triangle has 12 entries when its first variable is eliminated."""
    triangle = [(0, 1), (1, 2), (0, 2)]
    assert [Elimination([2, 2, 3], triangle, most).exact for most in (11, 12)] == [False, True]
    assert Elimination([2, 2, 3], triangle).order == [0, 1, 2], "of equal sums the first variable is eliminated first"
    assert Elimination([3, 2, 2], [(0,), (1, 2)]).order == [0, 1, 2]
    assert Elimination([5, 2, 2], [(0,), (1, 2)]).order == [1, 2, 0], "the smallest sum first"


def selection(text=NESTED, seed=0, measured=False, added=True):
    """Tables of a network with arbitrary integer costs that fall with the widths, and the cost and the loss of a state by their definition."""
    net = parse_network(text)
    found, blocks = groups(net), branches(net)
    rng = np.random.default_rng(seed)
    scores = {g.name: rng.integers(1, 30, g.size) / 4 for g in found} | {b.name: rng.integers(20, 60, 1) / 4 for b in blocks}
    size = {g.name: g.size for g in found}
    convs = {x.name: x for x in net.layers if x.op == "Conv"}
    touching = {name: tuple(g.name for g in found if name in g.layers) for name in convs}
    launch = {name: int(rng.integers(1, 6)) for name in convs}

    def price(item, widths):
        return float(launch[item] + np.prod([widths.get(g, size[g]) for g in touching[item]]))

    gone = {b.name: frozenset(b.layers) & convs.keys() for b in blocks}
    costs = Costs("units", price, touching, gone, {b.name: 2.0 for b in blocks} if added else None, measured)
    tables = Tables(found, blocks, scores, costs, {g.name: range(1, g.size + 1) for g in found})

    def cost(x):
        widths = {g.name: tables.widths[v][x[v]] for v, g in enumerate(tables.groups)}
        removed = [b.name for n, b in enumerate(blocks) if x[len(tables.groups) + n]]
        return costs.total(widths, removed)

    def loss(x):
        removed = [b for n, b in enumerate(blocks) if x[len(tables.groups) + n]]
        total = 0.0
        for v, g in enumerate(tables.groups):
            if not any(set(g.layers) <= set(b.layers) for b in removed):
                total += float(np.sort(scores[g.name])[: g.size - tables.widths[v][x[v]]].sum())
        return total + sum(float(scores[b.name].sum()) for b in removed if not any(set(b.layers) < set(c.layers) for c in removed))

    return tables, cost, loss


def states_of(tables):
    return [list(x) for x in product(*(range(n) for n in tables.sizes))]


def changed(x, v, n):
    return [n if u == v else old for u, old in enumerate(x)]


@pytest.mark.parametrize("text", [NESTED, DEEP])
def test_tables_hold_what_all_states_cost_and_lose(text):
    tables, cost, loss = selection(text)
    states = states_of(tables)
    assert len(states) == np.prod(tables.sizes) > 30
    for x in states:
        assert tables.cost(x) == cost(x)
        assert tables.loss(x) == pytest.approx(loss(x), abs=1e-12)
    scopes = tables.scopes()
    for price, losses in ((1.0, 0.0), (0.5, 1.0), (0.0, 2.0)):
        weighed, constant = tables.weigh_tables(price, losses)
        for x in states[:: len(states) // 50 + 1]:
            assert summed(scopes, weighed, x) + constant == pytest.approx(price * cost(x) + losses * loss(x), abs=1e-9)


@pytest.mark.parametrize("text", [NESTED, DEEP])
def test_columns_are_the_differences_of_states(text):
    tables, cost, loss = selection(text)
    for x in states_of(tables)[::5]:
        for v in range(len(x)):
            losses, costs = tables.column(v, x)
            own = [changed(x, v, n) for n in range(tables.sizes[v])]
            np.testing.assert_allclose(costs - costs[0], [cost(y) - cost(own[0]) for y in own], atol=1e-9)
            np.testing.assert_allclose(losses - losses[0], [loss(y) - loss(own[0]) for y in own], atol=1e-9)
            steps = tables.steps_up(v, x, 40.0)
            better = [n for n, y in enumerate(own) if loss(y) < loss(x) - 1e-8]
            rates = {n: -(loss(x) - loss(own[n])) / max(cost(own[n]) - cost(x), 40e-9) for n in better}
            assert [n for _, n, _ in steps] == sorted(better, key=lambda n: (round(rates[n], 9), n)) or len(set(rates.values())) < len(rates)
            for rate, n, more in steps:
                assert rate == pytest.approx(rates[n])
                assert more == pytest.approx(cost(own[n]) - cost(x))


def test_chosen_widths_exclude_whole_groups_and_those_in_removed_branches():
    tables, _, _ = selection()
    names = [g.name for g in tables.groups]
    for x in states_of(tables)[::3]:
        removed = [b for n, b in enumerate(tables.blocks) if x[len(names) + n]]
        inside = {g.name for g in tables.groups if any(set(g.layers) <= set(b.layers) for b in removed)}
        want = {name: tables.widths[v][x[v]] for v, name in enumerate(names) if x[v] and name not in inside}
        assert tables.chosen(x) == (want, tuple(b.name for b in removed))
    assert [tables.is_width(v) for v in range(len(tables.sizes))] == [True] * len(names) + [False] * len(tables.blocks)


def test_all_entries_are_priced_if_they_are_few_enough():
    few = selection(DEEP)[0]
    assert few.asked == 0
    assert not few.price_all(10)
    assert few.asked == 0
    entries = sum(int(np.isnan(t.prices).sum()) for t in few.terms)
    assert not few.price_all(entries - 1)
    assert few.price_all(entries)
    assert few.asked == entries
    assert few.price_all(0), "nothing is unknown now"


def test_unknown_costs_are_bounded_by_known_narrower_ones():
    tables, cost, _ = selection(DEEP, measured=True)
    states = states_of(tables)
    rng = np.random.default_rng(3)
    for n in (5, 40):
        for k in rng.permutation(len(states))[:n]:
            tables.cost(states[k])
        weighed, constant = tables.weigh_tables(1.0, 0.0)
        bounds = np.array([summed(tables.scopes(), weighed, x) + constant for x in states])
        real = np.array([cost(x) for x in states])
        assert (bounds <= real + 1e-9).all()
        assert (bounds == real).sum() >= n
        for v in range(len(tables.groups)):  # never smaller at a larger width
            for x, b in list(zip(states, bounds, strict=True))[::9]:
                if x[v]:
                    assert bounds[states.index(changed(x, v, x[v] - 1))] >= b - 1e-9
    while tables.asked < 10**6 and not tables.price_all(10**6):
        pass
    weighed, constant = tables.weigh_tables(1.0, 0.0)
    assert all(summed(tables.scopes(), weighed, x) + constant == pytest.approx(cost(x)) for x in states[::7])


@pytest.mark.parametrize(
    ("costs", "alike", "edges"),
    [
        ([8, 8, 6, 6, 2], 0.0, [0, 2, 4]),
        ([8, 9, 8, 7.99], 0.0, [0, 3]),
        ([100, 99.5, 99, 98.9, 98], 0.01, [0, 3]),  # at exactly 1 % less it is no edge
        ([5, 7, 5], 0.0, [0]),
        ([3], 0.01, [0]),
        ([float("nan"), 3], 0.0, [0]),
    ],
)
def test_edges_of_a_staircase(costs, alike, edges):
    assert find_steps(costs, alike) == edges


@pytest.mark.parametrize("price", [0.0, 0.1, 0.7, 3.0, INF])
@pytest.mark.parametrize("text", [NESTED, DEEP])
def test_descent_ends_where_no_single_change_is_better(text, price):
    tables, cost, loss = selection(text)

    def value(x):
        return cost(x) if price == INF else loss(x) + price * cost(x)

    for start in states_of(tables)[::11]:
        x = descend(tables, start, price)
        assert value(x) <= value(start) + 1e-9
        for v in range(len(x)):
            values = [value(changed(x, v, n)) for n in range(tables.sizes[v])]
            assert value(x) <= min(values) + 1e-9
            if not tables.is_width(v):
                continue
            assert x[v] == next(n for n, y in enumerate(values) if y <= min(values) + 1e-9), "of equal widths the widest"


def slowly_down(tables, cost, loss, x, target, fixed):
    """One step at a time: of all values that save, the least loss per cost saved, as far as the saving is needed."""
    while cost(x) > target:
        offers = []
        for v in range(len(x)):
            for n in range(tables.sizes[v]):
                y = changed(x, v, n)
                if v != fixed and cost(y) < cost(x) - 1e-6:
                    offers.append(((loss(y) - loss(x)) / min(cost(x) - cost(y), cost(x) - target), v, n))
        if not offers:
            return None
        least = min(rate for rate, _, _ in offers)
        _, v, n = min((o for o in offers if o[0] <= least + 1e-9), key=lambda o: o[1:])
        x = changed(x, v, n)
    return x


def slowly_up(tables, cost, loss, x, target):
    """One step at a time: the most importance per cost among the best step of each variable that fits."""
    while True:
        offers = []
        for v in range(len(x)):
            own = []
            for n in range(tables.sizes[v]):
                y = changed(x, v, n)
                if loss(y) < loss(x) - 1e-6 and cost(y) <= target:
                    own.append((-(loss(x) - loss(y)) / max(cost(y) - cost(x), 1e-9 * target), v, n))
            offers += own
        if not offers:
            return x
        least = min(rate for rate, _, _ in offers)
        _, v, n = min((o for o in offers if o[0] <= least * (1 - 1e-12) + 1e-12), key=lambda o: o[1:])
        x = changed(x, v, n)


@pytest.mark.parametrize("share", [0.9, 0.6, 0.35, 0.15])
@pytest.mark.parametrize(("text", "seed"), [(NESTED, 0), (NESTED, 1), (DEEP, 2), (DEEP, 3)])
def test_rounding_takes_the_best_steps(text, seed, share):
    tables, cost, loss = selection(text, seed)
    full = [0] * len(tables.sizes)
    for target in (share * cost(full), float(round(share * cost(full)))):
        for fixed in (-1, 0, len(full) - 1):
            want = slowly_down(tables, cost, loss, full, target, fixed)
            down = step_down(tables, full, target, fixed)
            assert down == want
            assert round_to_budget(tables, full, target, fixed) == (None if down is None else fill_budget(tables, down, target))
            if down is None:
                continue
            up = fill_budget(tables, down, target)
            assert cost(up) <= target
            assert loss(up) == pytest.approx(loss(slowly_up(tables, cost, loss, down, target)))
            assert step_down(tables, up, cost(up)) == up, "a cost of exactly the target is within it"


@pytest.mark.parametrize("share", [0.8, 0.5, 0.3])
@pytest.mark.parametrize(("text", "seed"), [(NESTED, 0), (NESTED, 4), (DEEP, 1), (DEEP, 5)])
def test_exchanges_end_where_no_value_and_rounding_is_better(text, seed, share):
    tables, cost, loss = selection(text, seed)
    target = share * cost([0] * len(tables.sizes))
    start = step_down(tables, [0] * len(tables.sizes), target)
    if start is None:
        return
    assert exchange(tables, start, target, 0) == start
    x = exchange(tables, start, target, 10**6)
    assert cost(x) <= target
    assert loss(x) <= loss(start)
    for v in range(len(x)):
        for n in set(range(tables.sizes[v])) - {x[v]}:
            y = round_to_budget(tables, changed(x, v, n), target, v)
            assert y is None or loss(y) >= loss(x) * (1 - 1e-8)


@pytest.mark.parametrize("measured", [False, True])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("text", [NESTED, DEEP])
def test_the_search_finds_the_optimum_or_states_a_bound_below_it(text, seed, measured):
    tables, cost, loss = selection(text, seed, measured)
    states = states_of(selection(text, seed)[0])
    table = np.array([(cost(x), loss(x)) for x in states])
    for share in (0.85, 0.55, 0.3):
        target = float(round(share * table[0, 0]))
        tables, cost, loss = selection(text, seed, measured)
        steps: list[tuple[int, int, str]] = []
        found = Search(tables, target, lambda *step, steps=steps: steps.append(step)).run()
        within = table[table[:, 0] <= target]
        if not len(within):
            assert (found.x, found.bound, found.least) == (None, 0.0, table[:, 0].min())
            continue
        best = within[:, 1].min()
        assert cost(found.x) <= target
        assert found.bound <= best * (1 + 1e-9)
        if measured:
            assert best <= loss(found.x) + 1e-9
            assert exchange(tables, found.x, target, 10**6) == found.x or loss(found.x) - found.bound <= 1e-3 * loss(found.x)
        else:
            assert loss(found.x) == pytest.approx(best)
            assert found.bound == pytest.approx(best, rel=2e-6)
        assert [d for d, _, _ in steps] == list(range(1, len(steps) + 1))
        assert all(of >= done and what.endswith(" units") for done, of, what in steps)


def test_equal_scores_keep_the_first_units_and_single_units_stay():
    text = "network n source\nin %x: f32[N,3,2,2]\nconst %w: f32[4,3,1,1] = seed(1)\nconst %v: f32[1,4,1,1] = seed(2)\n"
    net = parse_network(text + "const %u: f32[2,1,1,1] = seed(3)\n%a = Conv(%x, %w)\n%b = Conv(%a, %v)\n%y = Conv(%b, %u)\nout %y\n")
    found = groups(net)
    scores = {g.name: np.ones(g.size) for g in found}
    costs = Costs("channels", lambda item, widths: widths.get("w", 4), {"w": ("w",)}, {})
    for target, kept in ((4.0, None), (3.99, [0, 1, 2]), (3.0, [0, 1, 2]), (2.0, [0, 1]), (1.0, [0])):
        choice = choose_within(found, [], scores, costs, target, multiple=1)
        assert {name: at.tolist() for name, at in choice.kept.items()} == ({} if kept is None else {"w": kept})
        assert (choice.before, choice.after, choice.lost) == (4, 4 - (0 if kept is None else 4 - len(kept)), choice.before - choice.after)
    with pytest.raises(PruneError, match=r"the target of 0.5 channels is unreachable \(0.12 of the present cost\).* 1 of 4 remain\."):
        choose_within(found, [], scores, costs, 0.5, multiple=1)
    scores["w"] = np.array([1.0, 3.0, 1.0, 2.0])
    assert choose_within(found, [], scores, costs, 2.0, multiple=1).kept["w"].tolist() == [1, 3]
    assert choose_within(found, [], scores, costs, 3.0, multiple=1).kept["w"].tolist() == [0, 1, 3]


def parallel(count, costs_of, total=None, seed=0, constant=0):
    """Tables of parallel convolutions that are whole or have one channel, with a cost each (1 if narrow), or one `total` of all; and a cost that no
    width changes."""
    lines = ["network n source", "in %x: f32[N,2,2,2]"]
    for i in range(count):
        lines += [f"const %w{i}: f32[3,2,1,1] = seed({i + 1})", f"%a{i} = Conv(%x, %w{i})"]
    lines += ["%c = Concat(" + ", ".join(f"%a{i}" for i in range(count)) + ", axis=1)", f"const %v: f32[2,{3 * count},1,1] = seed(99)",
              "%y = Conv(%c, %v)", "out %y", ""]  # fmt: skip
    found = groups(parse_network("\n".join(lines)))
    assert [g.name for g in found] == [f"w{i}" for i in range(count)]
    scores = {g.name: np.array([100.0, s, 0.0]) for g, s in zip(found, np.random.default_rng(seed).permutation(3 * count)[:count] + 1.0, strict=True)}
    if total is None:
        costs = Costs(
            "units",
            lambda item, w: float(constant if item == "fixed" else costs_of[int(item)] if w.get(f"w{item}", 3) == 3 else 1),
            {str(i): (f"w{i}",) for i in range(count)} | ({"fixed": ()} if constant else {}),
            {},
        )
    else:
        costs = Costs("units", lambda item, w: float(sum(c for i, c in enumerate(costs_of) if w.get(f"w{i}", 3) == 3)), {"all": tuple(scores)}, {})
    return Tables(found, [], scores, costs, {g.name: (1, 3) for g in found}), np.array([scores[g.name][1] for g in found])


@pytest.mark.parametrize("seed", range(12))
def test_the_search_solves_knapsacks_that_steps_and_exchanges_do_not(seed):
    """Costs that are almost the losses: rates tell little (strongly correlated: D. Pisinger, Computers & Operations Research 32, 2005)."""
    losses = parallel(10, [1] * 10, seed=seed)[1]
    costs = losses + 10
    tables, _ = parallel(10, costs, seed=seed)
    gone = np.array(list(product((0, 1), repeat=10)))
    for share in (0.7, 0.45):
        target = float(round(share * costs.sum()))
        best = (gone @ losses)[costs.sum() - gone @ (costs - 1) <= target].min()
        found = Search(tables, target).run()
        assert tables.cost(found.x) <= target
        assert (tables.loss(found.x), found.bound) == (pytest.approx(best), pytest.approx(best, rel=2e-6))


@pytest.mark.parametrize(
    ("size", "seed", "share", "count"),
    [(10, 0, 0.6, 170), (10, 1, 0.6, 446), (10, 2, 0.6, 88), (10, 3, 0.6, 144), (10, 7, 0.7, 314), (14, 0, 0.6, 350)],
)
def test_a_cost_that_no_width_changes_does_not_weaken_the_bounds(size, seed, share, count, monkeypatch):
    """With a target that is larger by as much, branch and bound expands the same nodes, no more than recorded here."""
    costs, regrets, nodes = parallel(size, [1] * size, seed=seed)[1] + 10, Swept.regrets, []
    monkeypatch.setattr(Swept, "regrets", lambda swept, n, x: (nodes.append(n), regrets(swept, n, x))[1])
    expanded = []
    for constant in (0, 64):
        nodes.clear()
        tables, _ = parallel(size, costs, seed=seed, constant=constant)
        found = Search(tables, float(round(share * costs.sum())) + constant).run()
        expanded.append((len(nodes), found.x, tables.loss(found.x)))
    assert expanded[0] == expanded[1]
    assert 50 < expanded[0][0] <= count


@pytest.mark.parametrize("share", [0.95, 0.7, 0.3, 0.05])
@pytest.mark.parametrize("count", [13, 24])
def test_prices_of_tables_that_are_too_wide_are_bracketed_and_bisected(count, share, monkeypatch):
    """By factors of four until one state is within the target and one is not, then by geometric means until they are 2 % apart."""
    costs, weigh, prices = np.random.default_rng(count).permutation(3 * count)[:count] + 5.0, Tables.weigh_tables, []
    tables, losses = parallel(count, costs, total=True)

    def record(self, price, *weights):
        if not weights and prices[-1:] != [price]:
            prices.append(price)
        return weigh(self, price, *weights)

    monkeypatch.setattr(Tables, "weigh_tables", record)
    totals: list[float] = []
    Search(tables, share * costs.sum(), lambda done, of, what: totals.append(float(what.split()[0]))).run()
    assert prices[0] == pytest.approx(losses.sum() / costs.sum())
    low, high = 0.0, INF
    for price, total, following in zip(prices, totals, [*prices[1:], None], strict=True):
        low, high = (price, high) if total > share * costs.sum() else (low, price)
        want = price * 4 if high == INF else price / 4 if low == 0 else (low * high) ** 0.5
        assert (following is None) == (high < 1.02 * low)
        assert following is None or following == pytest.approx(want)


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5, 0.2, 0.05])
@pytest.mark.parametrize("count", [13, 24])
def test_two_or_three_steps_are_taken_per_comparison_of_many_widths(count, share):
    costs = np.random.default_rng(count).permutation(3 * count)[:count] + 5.0
    tables, losses = parallel(count, costs, total=True)
    assert tables.wide
    target, x, cost = share * costs.sum(), [0] * count, costs.sum()
    while cost > target:
        rates = sorted((losses[v] / min(costs[v], cost - target), v) for v in range(count) if not x[v])
        for _, v in rates[: 1 + count // 12]:
            x[v], cost = 1, cost - costs[v]
            if cost <= target:
                break
    assert step_down(tables, [0] * count, target) == x
