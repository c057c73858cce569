"""Both halves of every method: they exist, have one name, and agree on the traits that both sides rely on."""

from dataclasses import FrozenInstanceError
from functools import cached_property
from pkgutil import resolve_name

import pytest

from polyclinic.strategies.local.method_traits import MethodTraits
from polyclinic.strategies.local.site_method import SequentialSite, SiteMethod
from polyclinic.strategies.method_list import METHOD_CLASS_PATHS
from polyclinic.strategies.methods.base import Method, SequentialMethod, make_method
from polyclinic.strategies.registry import STRATEGIES

HOOKS = {
    "early_stopping",
    "find_own_parameter_faults",
    "find_training_faults",
    "local_loss",
    "loss",
    "make_batch_weight",
    "make_round",
    "missing_labels_count_as",
    "payload",
    "pooled_missing_labels",
    "special_last_rounds",
}
"""Members of the hospital's half that a method may override, besides its traits."""


def overrides(half: type, base: type, member: str) -> bool:
    return getattr(half, member) is not getattr(base, member)


@pytest.mark.parametrize("name", sorted(METHOD_CLASS_PATHS))
def test_both_halves_exist_and_have_one_name(name: str) -> None:
    method = STRATEGIES[name]
    site = method.site_class
    assert issubclass(method, Method)
    assert issubclass(site, SiteMethod)
    assert vars(site)["traits"].name == name  # its own, not those of a base class
    assert site.__module__ == method.__module__
    assert site.__name__ == f"{method.__name__}Site"
    assert resolve_name(f"{method.__module__}:{method.__name__}") is method
    assert method.__doc__


@pytest.mark.parametrize("name", sorted(METHOD_CLASS_PATHS))
def test_both_halves_agree_on_the_traits(name: str) -> None:
    method = STRATEGIES[name]
    site = method.site_class
    traits = site.traits
    assert traits.sequential == issubclass(site, SequentialSite) == issubclass(method, SequentialMethod)
    assert traits.weighs_updates == overrides(method, Method, "site_weights")
    assert bool(traits.payload.statistics) == overrides(method, Method, "statistics_shape")

    aggregates = overrides(method, Method, "aggregate_statistics")
    assert aggregates or not (traits.reads_updates or traits.stores_statistics_by_site)
    assert aggregates or traits.weighs_updates or not traits.payload.statistics  # somebody uses what sites send
    if issubclass(method, SequentialMethod):
        assert issubclass(site, SequentialSite)
        assert aggregates or not site.traits.stores_site_models
        assert site.traits.has_averaging_rounds == overrides(site, SequentialSite, "averages_in_round")
        assert overrides(method, SequentialMethod, "order_sites") or (traits.hospitals_train and not traits.ranks_sites)


@pytest.mark.parametrize("name", sorted(METHOD_CLASS_PATHS))
def test_a_hospitals_half_overrides_hooks_alone_and_its_own_loss_is_not_taken_for_the_loss_of_each_image(
    name: str,
) -> None:
    site = STRATEGIES[name].site_class
    members = {member for member in vars(SiteMethod) if not member.startswith("__")}
    overridden = {
        member
        for half in site.__mro__
        if issubclass(half, SiteMethod) and half is not SiteMethod
        for member in vars(half).keys() & members
    }
    assert overridden <= HOOKS | {"traits"}
    assert site().loss_is_per_image == (not overridden & {"make_round", "local_loss"})


def test_the_hooks_are_about_a_dozen_and_all_are_members() -> None:
    assert len(HOOKS) <= 12
    assert {name for name in HOOKS if name in vars(SiteMethod)} == HOOKS


def test_traits_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        STRATEGIES["surgical"].site_class.traits.weighs_updates = True  # type: ignore[misc]


def test_a_coordinators_half_without_rules_of_its_own_has_those_of_the_given_class() -> None:
    class QuietSite(SequentialSite):
        """A method whose hospitals train as in ``fedseq``."""

        traits = STRATEGIES["fedseq"].site_class.traits

    quiet = make_method(SequentialMethod, QuietSite)
    assert (quiet.__name__, quiet.site_class, quiet.__doc__) == ("Quiet", QuietSite, QuietSite.__doc__)
    assert {member for member in vars(quiet) if not member.startswith("_")} == {"site_class"}
    assert quiet.order_sites is SequentialMethod.order_sites


OLD_MEMBERS = {
    "name": "old",
    "plain_client": True,
    "weighs_updates": True,
    "client": lambda half, context: None,
    "declared_payload": cached_property(lambda half: None),
    "find_parameter_faults": lambda half: [],
}


@pytest.mark.parametrize("member", sorted(OLD_MEMBERS))
def test_a_class_written_for_release_0_1_0_is_refused_because_its_member_would_be_ignored(member: str) -> None:
    with pytest.raises(TypeError, match=member):
        type("Old", (SiteMethod,), {"traits": MethodTraits("old"), member: OLD_MEMBERS[member]})
