"""Other module names for ours, in this process only: a script written for those names runs unedited.

The modules are the same objects under both names, so classes, registries and ``isinstance`` agree.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

from distmd_protocol.errors import AliasClashError


class AliasFinder(MetaPathFinder, Loader):
    """Finds ``alias.x.y`` as the module ``real.x.y``.

    Parameters
    ----------
    aliases
        Real name of each alias. The longest alias that a name begins with counts.
    """

    def __init__(self, aliases: Mapping[str, str]) -> None:
        self.aliases = dict(aliases)
        self._specs: dict[str, ModuleSpec | None] = {}

    def real_name(self, name: str) -> str | None:
        """Name of the module that ``name`` stands for; ``None`` if it is no alias."""
        matching = [alias for alias in self.aliases if name == alias or name.startswith(f"{alias}.")]
        if not matching:
            return None
        alias = max(matching, key=len)
        return self.aliases[alias] + name.removeprefix(alias)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for an alias; ``None`` for every other name.

        Raises
        ------
        ModuleNotFoundError
            For an alias of a module that does not exist, naming both.
        """
        real = self.real_name(fullname)
        if real is None:
            return None
        if importlib.util.find_spec(real) is None:
            message = f"No module named {fullname!r}: it stands for {real!r}, which does not exist"
            raise ModuleNotFoundError(message, name=fullname)
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The real module, imported under its own name."""
        real = self.real_name(spec.name)
        assert real is not None
        module = importlib.import_module(real)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run a second time; the import system's mark of the alias is taken off the module again."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name)


def install_aliases(aliases: Mapping[str, str]) -> AliasFinder:
    """Let this process import our modules under other names.

    Parameters
    ----------
    aliases
        Real name of each alias, as ``{"other": "ours", "other.part": "ours"}``.

    Raises
    ------
    AliasClashError
        If a package of an alias's top-level name is installed or imported: then the name means that package.
    """
    for finder in sys.meta_path:
        if isinstance(finder, AliasFinder) and finder.aliases == dict(aliases):
            return finder
    for top in sorted({alias.partition(".")[0] for alias in aliases}):
        _refuse_installed(top, aliases)
    finder = AliasFinder(aliases)
    # First, or the path of the real package would give its submodules a second time, under the alias.
    sys.meta_path.insert(0, finder)
    return finder


def run_script(module: str, aliases: Mapping[str, str], arguments: Sequence[str]) -> int:
    """Run a script as ``python script.py arguments…`` does, with aliases.

    Parameters
    ----------
    module
        Name of the calling module, for the usage line.
    aliases
        As in ``install_aliases``.
    arguments
        Path of the script, and the script's own arguments.

    Returns
    -------
    Exit code: 0, or 2 after a usage error or a clash, which is written to standard error. What the script raises passes
    through.
    """
    usage = f"usage: python -m {module} SCRIPT [ARGUMENTS…]"
    if not arguments or arguments[0].startswith("-"):
        asked = bool(arguments) and arguments[0] in ("-h", "--help")
        rule = "\n".join(f"  {alias}.X is {real}.X" for alias, real in sorted(aliases.items(), reverse=True))
        _say(f"{usage}\n\nRuns SCRIPT with these names, in this process only:\n{rule}")
        return 0 if asked else 2
    script = Path(arguments[0])
    if not script.is_file():
        _say(f"{usage}\n{script} is no file")
        return 2
    _look_beside(script)
    try:
        install_aliases(aliases)
    except AliasClashError as error:
        _say(str(error))
        return 2
    sys.argv[:] = list(arguments)
    runpy.run_path(str(script), run_name="__main__")
    return 0


def _look_beside(script: Path) -> None:
    """Put the script's folder where ``python -m`` put the working directory, as ``python script.py`` has it."""
    if sys.flags.safe_path:
        return
    folder = str(script.resolve().parent)
    if sys.path and sys.path[0] in ("", os.getcwd()):
        sys.path[0] = folder
    else:
        sys.path.insert(0, folder)


def _refuse_installed(name: str, aliases: Mapping[str, str]) -> None:
    loaded = sys.modules.get(name)
    spec = importlib.util.find_spec(name) if loaded is None else loaded.__spec__
    if loaded is None and spec is None:
        return
    owners = packages_distributions().get(name, [])
    if loaded is None and spec is not None and spec.origin is None and not owners:
        # A plain folder of that name, as in a clone's parent; it is no package.
        return
    who = ", ".join(f"{owner} {version(owner)}" for owner in owners) or "no distribution"
    where = spec.origin if spec is not None and spec.origin else getattr(loaded, "__path__", "")
    rule = ", ".join(f"{alias}.X is {real}.X" for alias, real in sorted(aliases.items(), reverse=True))
    raise AliasClashError(
        f"the package {name!r} is installed here ({who}; {where}), so 'import {name}' in a script already means it. "
        f"Run the script in an environment without it, or rename its imports ({rule}) and start it with plain python"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
