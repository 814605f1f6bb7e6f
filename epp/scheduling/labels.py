"""Filters by the endpoints' labels: a selector as in Kubernetes, the values of one label, the role."""

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from epp import names
from epp.pool.records import Mask
from epp.scheduling.membership import ByMembership, mask_where
from epp.scheduling.ports import Ctx

Labels = Mapping[str, str]

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = re.compile(rf"(?:(?=[^/]{{1,253}}/)[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?/)?{_NAME}")
_VALUE: Final = re.compile(rf"(?:{_NAME})?")


class LabelRequirement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """One requirement of a selector. An endpoint without the label fulfils `NotIn` and `DoesNotExist`.

    Attributes:
        values: one at least for `In` and `NotIn`, none for the others.
    """

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_key(self.key)
        for value in self.values:
            _check_value(value)
        if self.operator in ("In", "NotIn"):
            if not self.values:
                raise ValueError(f"operator {self.operator} needs at least one entry in values")
        elif self.values:
            raise ValueError(f"operator {self.operator} takes no values")

    def matches(self, labels: Labels) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class LabelSelector(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """A LabelSelector of Kubernetes, the parameters of `label-selector-filter`; empty = everything matches.

    Attributes:
        match_labels: each label has exactly this value.
        match_expressions: each requirement is fulfilled too.
    """

    match_labels: dict[str, str] = {}
    match_expressions: tuple[LabelRequirement, ...] = ()

    def __post_init__(self) -> None:
        for key, value in self.match_labels.items():
            _check_key(key)
            _check_value(value)

    def matches(self, labels: Labels) -> bool:
        return self.match_labels.items() <= labels.items() and all(
            requirement.matches(labels) for requirement in self.match_expressions
        )


class ByLabelParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Parameters of `by-label`.

    Attributes:
        valid_values: values to keep; an empty text among them keeps endpoints without the label too.
        allows_no_label: keep endpoints without the label.
    """

    label: Annotated[str, Meta(min_length=1)]
    valid_values: tuple[str, ...] = ()
    allows_no_label: bool = False

    def __post_init__(self) -> None:
        if not self.valid_values and not self.allows_no_label:
            raise ValueError("either validValues must be non-empty or allowsNoLabel must be true")

    def matches(self, labels: Labels) -> bool:
        value = labels.get(self.label)
        return (value or "") in self.valid_values or (value is None and self.allows_no_label)


DECODE_ROLES: Final = ByLabelParams(
    names.ROLE_LABEL, ("decode", "prefill-decode", "both", "encode-prefill-decode"), allows_no_label=True
)
"""`decode-filter`: endpoints that can decode; one without a role does everything."""

PREFILL_ROLES: Final = ByLabelParams(
    names.ROLE_LABEL, ("prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode")
)
"""`prefill-filter`: endpoints that can prefill."""

ENCODE_ROLES: Final = ByLabelParams(names.ROLE_LABEL, ("encode", "encode-prefill", "encode-prefill-decode"))
"""`encode-filter`: endpoints that can encode."""


class LabelFilter:
    """Keeps the endpoints whose labels match: `label-selector-filter`, `by-label`, and the role filters.

    Labels are looked at when membership or a label changes, not for each request.
    """

    def __init__(self, matches: Callable[[Labels], bool]) -> None:
        self._mask = ByMembership(lambda owners: mask_where(owners, lambda owner: matches(owner.labels)))

    def keep(self, ctx: Ctx, alive: Mask) -> Mask:
        return self._mask.of(ctx.view)


def _check_key(key: str) -> None:
    if not _KEY.fullmatch(key):
        raise ValueError(
            f"{key!r} is no label key: expected a name of at most 63 letters, digits, '-', '_' and '.', "
            "after a DNS name and '/' where it has a prefix"
        )


def _check_value(value: str) -> None:
    if not _VALUE.fullmatch(value):
        raise ValueError(
            f"{value!r} is no label value: expected at most 63 letters, digits, '-', '_' and '.', "
            "the first and last a letter or digit"
        )
