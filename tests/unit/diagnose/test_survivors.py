"""Verdicts of a deep look from recorded numbers: what is a leak and what only looks like one."""

from workbench.diagnose.survivors import find_suspects, follows_tokens
from workbench.observe.memory_look import MemoryLook
from workbench.observe.storages import Birth


def birth(step: int, *, line: str = "train.py:7", phase: str = "forward", num_bytes: int = 4096) -> Birth:
    return Birth(step, phase, "aten.mm", "head", line, num_bytes)


def look(num_steps: int = 12, **fields: object) -> MemoryLook:
    made = MemoryLook(steps=list(range(1, num_steps + 1)), tokens=[96] * num_steps, rest_bytes=[1000] * num_steps)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_nothing_that_stays_is_clean() -> None:
    assert find_suspects(look(nodes=[(1, 500), (6, 500), (11, 500)])) == []


def test_a_survivor_of_nearly_every_step_is_a_leak_with_its_line_and_rate() -> None:
    suspect = find_suspects(look(survivors=[birth(step) for step in range(1, 10)]))[0]
    assert (suspect.channel, suspect.line, suspect.bytes_per_step) == ("survivors", "train.py:7", 4096)


def test_survivors_of_one_step_are_no_leak() -> None:
    assert find_suspects(look(survivors=[birth(1), birth(1)])) == []


def test_survivors_at_a_regular_distance_are_periodic_with_their_period() -> None:
    suspect = find_suspects(look(30, survivors=[birth(step) for step in (4, 8, 12, 16, 20, 24)]))[0]
    assert (suspect.channel, suspect.period) == ("periodic", 4)


def test_survivors_at_irregular_distances_outside_evaluations_are_no_leak() -> None:
    assert find_suspects(look(30, survivors=[birth(3), birth(4), birth(20)])) == []


def test_nodes_must_rise_at_a_steady_rate() -> None:
    rising = find_suspects(look(nodes=[(1, 200), (6, 950), (11, 1700)]))
    assert [(s.channel, s.nodes_per_step) for s in rising] == [("nodes", 150.0)]
    assert find_suspects(look(nodes=[(1, 200), (6, 950), (11, 950)])) == []
    assert find_suspects(look(nodes=[(1, 950), (6, 900), (11, 950)])) == []


def test_a_site_that_is_replaced_by_a_longer_one_at_each_border_is_a_carried_cache() -> None:
    sites = {("train.py:9", "aten.cat", "attn"): [8192 * (i + 1) for i in range(12)]}
    suspect = find_suspects(look(site_bytes=sites))[0]
    assert (suspect.channel, suspect.op, suspect.bytes_per_step) == ("replaced", "aten.cat", 8192)


def test_a_site_that_grows_with_the_tokens_is_no_leak() -> None:
    tokens = [10 * (i + 1) for i in range(12)]
    sites = {("train.py:9", "aten.mm", "head"): [400 * count for count in tokens]}
    grown = look(site_bytes=sites, tokens=tokens, rest_bytes=[400 * count for count in tokens])
    assert find_suspects(grown) == []
    assert follows_tokens(grown)


def test_more_parameters_at_the_end_than_at_the_start_come_first() -> None:
    assert find_suspects(look(num_parameters=[100, 140]))[0].channel == "parameters"
