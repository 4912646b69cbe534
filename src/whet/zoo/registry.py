"""The zoo's models: the modules in families/ register them here."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from whet.errors import UsageError
from whet.registry import load_folder, suggest_name

Builder = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the zoo: its builder, options and published parameter count."""

    name: str
    family: str                       # file in families/
    about: str                        # one line for `whet zoo list`
    builder: Builder                  # builder(g, **fixed, **options) writes the network into a GraphWriter
    parameters: int                   # published count of trainable parameters
    fixed: dict[str, Any] = field(default_factory=dict)         # builder arguments that define this model of the family
    count_options: dict[str, Any] = field(default_factory=dict)  # options under which FLOPs are counted (static sizes)

    @property
    def options(self) -> dict[str, Any]:
        """Names and defaults of the caller's options."""
        parameters = inspect.signature(self.builder).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name not in self.fixed}


_ENTRIES: dict[str, Entry] = {}
_loaded = False


def register(name: str, builder: Builder, *, about: str, parameters: int, count_options: dict[str, Any] | None = None,
             **fixed: Any) -> None:
    """Adds a model. `fixed` are the builder arguments that define it. Raises ValueError for a registered name."""
    if name in _ENTRIES:
        raise ValueError(f"the zoo already has {name!r}, from families/{_ENTRIES[name].family}.py; choose another name")
    family = builder.__module__.rpartition(".")[2]
    _ENTRIES[name] = Entry(name=name, family=family, about=about, builder=builder, parameters=parameters, fixed=fixed,
                           count_options=count_options or {})


def list_entries() -> dict[str, Entry]:
    """All models by name; the first call imports the families folder."""
    global _loaded
    if not _loaded:
        from whet.zoo import families

        load_folder(families.__name__, families.__path__)
        _loaded = True
    return _ENTRIES


def names() -> list[str]:
    """Names of all models, sorted."""
    return sorted(list_entries())


def find_entry(name: str) -> Entry:
    """The model `name`. Raises UsageError with the nearest name if there is none."""
    known = list_entries()
    if name in known:
        return known[name]
    hint = suggest_name(name.lower().replace("-", "_"), known) or f" It has {', '.join(sorted(known))}."
    raise UsageError(f"The zoo has no model {name!r}.{hint}")
