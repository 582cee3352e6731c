"""Autograd graphs that are still reachable: which of them are new, and how many a collection holds."""

import torch
from torch import nn

from workbench import watch
from workbench.observe.graph_nodes import count_with_graph, made_since, next_node_number


def test_only_what_was_computed_since_counts_as_new() -> None:
    weight = torch.ones(2, requires_grad=True)
    old = weight * 2
    number = next_node_number()
    new, changed_in_place = weight * 3, old.clone()
    changed_in_place += weight
    assert [id(one) for one in made_since([old, new, changed_in_place], number)] == [id(new), id(changed_in_place)]


def test_the_number_can_be_asked_for_where_gradients_are_off() -> None:
    with torch.no_grad():
        number = next_node_number()
    assert made_since([torch.ones(1, requires_grad=True) * 2], number)


def test_entries_with_a_graph_are_counted_in_lists_and_mappings() -> None:
    value = torch.ones(1, requires_grad=True) * 2
    assert count_with_graph([value, (1, value), value.detach(), 3]) == 2
    assert count_with_graph({"a": value, "b": 1}) == 1


def test_a_large_graph_of_before_takes_no_blame_for_a_small_one_that_grows() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    older = torch.zeros(())
    for _ in range(200):
        older = older + model(torch.ones(1, 4)).mean()
    growing = torch.zeros(())
    with watch(model, optimizer, look="now") as w:
        for _ in range(18):
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            growing = growing + loss
            w.step(loss=loss)
    assert [finding.where["object"] for finding in w.findings] == ["growing"]
    assert older.grad_fn is not None and growing.grad_fn is not None
