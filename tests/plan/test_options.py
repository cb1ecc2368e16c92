"""The decision tree: as many options as the paper counts, each of them well formed."""

from __future__ import annotations

from psgc.plan.model.options import (
    DEVICES,
    Constraints,
    Option,
    all_options,
    constrained,
    encodes,
    is_uncompressed,
    server_options,
    subtree_sizes,
    unknown_actions,
)

STEPS_OF = {"reduce_scatter": "all_gather", "all_to_all": "all_gather", "reduce": "broadcast", "gather": "broadcast"}


def test_there_are_as_many_as_in_the_paper() -> None:
    assert len(set(all_options())) == len(all_options()) == 4341
    assert len(set(all_options(("gpu",)))) == len(all_options(("cpu",))) == 174
    assert sum(map(is_uncompressed, all_options())) == 9
    assert subtree_sizes() == {"T1": 5, "T2": 12, "T3": 63, "T4": 152, "T5": 29}
    assert sum(option[0].startswith("flat") or any("flat" in a for a in option) for option in all_options()) == 63


def test_the_number_of_encodes_is_spread_as_the_grammar_has_it() -> None:
    counts = [sum(encodes(option) == n for option in all_options()) for n in range(5)]
    assert counts == [9, 236, 1152, 1920, 1024]


def test_encodes_and_decodes_alternate_and_payload_collectives_carry_payloads() -> None:
    for option in (*all_options(), *server_options()):
        encoded = False
        for action in option:
            if action.startswith("comp@"):
                assert not encoded, option
                encoded = True
            elif action.startswith("decomp@"):
                assert encoded, option
                encoded = False
            else:
                assert action.endswith(".c") == encoded, option
        assert not encoded, option


def operations(option: Option, level: str) -> list[str]:
    return [action.split(".")[1] for action in option if action.startswith(f"{level}.")]


def test_second_steps_fit_first_steps() -> None:
    for option in all_options():
        for level in ("flat", "intra", "inter"):
            steps = operations(option, level)
            if len(steps) == 2:
                assert steps[1] == STEPS_OF[steps[0]], option
            else:
                assert steps in ([], ["all_reduce"], ["all_gather"]), option


def test_constraints_prune_the_tree() -> None:
    assert len(constrained(Constraints())) == 4341
    assert len(constrained(Constraints(devices=("gpu",)))) == 174
    assert constrained(Constraints(devices=())) == tuple(option for option in all_options() if is_uncompressed(option))
    assert max(map(encodes, constrained(Constraints(most_encodes=1)))) == 1
    assert len(constrained(Constraints(flat=False))) == 4278
    assert len(constrained(Constraints(hierarchical=False))) == 63
    with_servers = constrained(Constraints(servers=True))
    assert len(with_servers) == 4341 + len(server_options())


def test_server_options_are_all_ranks_a_nodes_sum_and_shards() -> None:
    assert len(server_options()) == 3 * (1 + 4)
    assert ("flat.push", "flat.pull") in server_options()
    assert ("intra.reduce_scatter", "comp@gpu", "inter.push.c", "inter.pull.c", "decomp@cpu", "intra.all_gather") in server_options()
    assert not set(server_options()) & set(all_options())


def test_actions_that_are_none_are_found() -> None:
    assert unknown_actions(("flat.push", "flat.pull")) == []
    assert unknown_actions(("comp@tpu", "flat.all_reduce", "flat.reduce")) == ["comp@tpu"]
    assert DEVICES == ("gpu", "cpu")
