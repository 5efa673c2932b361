"""Which arithmetic is in force, and how to pin it to full float32.

The protocol imports neither jax nor torch. Each backend's package calls ``register_backend`` when it is imported and
so lends its switches; what is registered is this module's only state. Source of the switches: NVIDIA's cuBLAS and
cuDNN documentation (``NVIDIA_TF32_OVERRIDE``), JAX's ``jax_default_matmul_precision`` option.
"""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distmd_protocol.errors import PrecisionWarning, ProtocolError

_log = logging.getLogger(__name__)

PINNED_ENVIRONMENT: Mapping[str, str] = {
    "NVIDIA_TF32_OVERRIDE": "0",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
}
"""What ``pin_fp32`` sets. Child processes inherit it."""

_REPORTED_ENVIRONMENT = (
    *PINNED_ENVIRONMENT,
    "XLA_FLAGS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NPROC",
)
_REPORTED_CPU_FEATURES = frozenset(
    {"sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile"}
    | {"asimd", "sve", "sve2", "bf16"}
)


@dataclass(frozen=True)
class Backend:
    """One numerical library's switches, as its package lends them.

    Parameters
    ----------
    name
        ``"jax"``, ``"torch"``, ….
    pin
        Turns reduced-precision float32 arithmetic off. Idempotent.
    report
        Returns the settings in force as a JSON-able dict: default dtype, TF32/matmul settings, flags, thread count,
        device kind.
    reduced
        Returns one line for each setting under which float32 arithmetic is not full float32; empty when all is well.
    context_exists
        True when a CUDA context exists already, so that ``NVIDIA_TF32_OVERRIDE`` comes too late for this process.
    """

    name: str
    pin: Callable[[], None]
    report: Callable[[], dict[str, Any]]
    reduced: Callable[[], list[str]] = lambda: []
    context_exists: Callable[[], bool] = lambda: False


class _Registry:
    """Backends by name, and which warnings this process has given."""

    def __init__(self) -> None:
        self.backends: dict[str, Backend] = {}
        self.warned: set[tuple[str, ...]] = set()

    def warn_once(self, key: tuple[str, ...], message: str, stacklevel: int = 3) -> None:
        if key not in self.warned:
            self.warned.add(key)
            warnings.warn(message, PrecisionWarning, stacklevel=stacklevel + 1)


_registry = _Registry()


def register_backend(
    name: str,
    *,
    pin: Callable[[], None],
    report: Callable[[], dict[str, Any]],
    reduced: Callable[[], list[str]] = lambda: [],
    context_exists: Callable[[], bool] = lambda: False,
) -> None:
    """Lend a backend's switches to ``pin_fp32``, ``PrecisionPolicy`` and ``warn_if_reduced``.

    Called by a package when it is imported; a second call under the same name replaces the first. The parameters are
    those of ``Backend``.
    """
    _registry.backends[name] = Backend(name, pin, report, reduced, context_exists)


def registered_backends() -> tuple[str, ...]:
    """Names of the backends that have registered, sorted."""
    return tuple(sorted(_registry.backends))


def pin_fp32() -> None:
    """Make float32 mean float32, here and in every process started from here. Call it before models are built.

    Sets ``PINNED_ENVIRONMENT`` and calls every registered backend's own switch. Calling it again changes nothing.

    Warns
    -----
    PrecisionWarning
        If a CUDA context exists already: the libraries have read ``NVIDIA_TF32_OVERRIDE`` by then.
    """
    late = "NVIDIA_TF32_OVERRIDE"
    too_late = os.environ.get(late) != PINNED_ENVIRONMENT[late]
    os.environ.update(PINNED_ENVIRONMENT)
    for backend in _registry.backends.values():
        backend.pin()
        if too_late and backend.context_exists():
            _registry.warn_once(
                ("context", backend.name),
                f"pin_fp32() was called after {backend.name} made a CUDA context, which has read {late} already: "
                f"library kernels may still use TF32. Call pin_fp32() before the first tensor is put on the GPU, or "
                f"start the program with {late}=0",
            )


@dataclass(frozen=True)
class PrecisionPolicy:
    """The arithmetic in force.

    Parameters
    ----------
    environment
        The variables that steer precision, flags and thread counts, as far as they are set.
    backends
        Each registered backend's report.
    cpu
        Machine type and the vector features that change how sums are rounded.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    backends: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    cpu: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def current(cls) -> PrecisionPolicy:
        """Read the policy of this process."""
        return cls(
            environment={name: os.environ[name] for name in _REPORTED_ENVIRONMENT if name in os.environ},
            backends={name: backend.report() for name, backend in sorted(_registry.backends.items())},
            cpu={"machine": platform.machine(), "features": _cpu_features()},
        )

    def to_json(self) -> dict[str, Any]:
        """Return the policy as a JSON-able dict."""
        return {
            "environment": dict(self.environment),
            "backends": {name: dict(report) for name, report in self.backends.items()},
            "cpu": dict(self.cpu),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> PrecisionPolicy:
        """Read what ``to_json`` returned.

        Raises
        ------
        ProtocolError
            If a part is missing or is not a JSON object.
        """
        environment, backends, cpu = (value.get(name) for name in ("environment", "backends", "cpu"))
        if not isinstance(environment, Mapping) or not isinstance(backends, Mapping) or not isinstance(cpu, Mapping):
            raise ProtocolError(f"a precision policy has the objects environment, backends, cpu, not {sorted(value)}")
        if not all(isinstance(report, Mapping) for report in backends.values()):
            raise ProtocolError("a backend's report in a precision policy is not an object")
        return cls(environment, backends, cpu)

    def flat(self) -> dict[str, str]:
        """Return every setting as one line of text, by a dotted name."""
        lines: dict[str, str] = {}

        def visit(value: Any, name: str) -> None:
            if isinstance(value, Mapping):
                for key, child in value.items():
                    visit(child, f"{name}.{key}" if name else str(key))
            else:
                lines[name] = str(value)

        visit(self.to_json(), "")
        return lines

    def differences(self, other: PrecisionPolicy) -> list[tuple[str, str, str]]:
        """Return ``(setting, here, there)`` for each setting in which the two differ; ``-`` stands for unset.

        Backends that only one of the two knows are left out: a torch reader of a JAX file has no JAX settings.
        """
        mine, theirs = self.flat(), other.flat()
        shared = set(self.backends) & set(other.backends)
        return [
            (name, mine.get(name, "-"), theirs.get(name, "-"))
            for name in sorted(mine.keys() | theirs.keys())
            if mine.get(name) != theirs.get(name)
            and not (name.startswith("backends.") and name.split(".")[1] not in shared)
        ]


def reduced_settings() -> list[str]:
    """Return one line for each setting, of the environment or of a backend, under which float32 is not float32."""
    lines = [f"{name}: {line}" for name, backend in _registry.backends.items() for line in backend.reduced()]
    if os.environ.get("NVIDIA_TF32_OVERRIDE") == "1":
        lines.append("environment: NVIDIA_TF32_OVERRIDE=1 forces TF32")
    return lines


def warn_if_reduced(scope: str) -> None:
    """Warn, once in a process, that a distributed scope opens with reduced precision in force.

    Parameters
    ----------
    scope
        What opens, in a user's words (``"DomainParallel"``).
    """
    reduced = reduced_settings()
    if reduced:
        _registry.warn_once(
            ("reduced",),
            f"{scope} opens with reduced float32 precision in force ({'; '.join(reduced)}): results will differ "
            "between devices and rank counts. Call pin_fp32() before models are built",
        )


def warn_if_other_policy(stored: PrecisionPolicy, where: str) -> None:
    """Warn, once a pair of policies, that a state is restored under another policy than it was written under."""
    current = PrecisionPolicy.current()
    differences = current.differences(stored)
    if differences:
        lines = "; ".join(f"{name}: written under {there}, now {here}" for name, here, there in differences)
        _registry.warn_once(
            ("restore", lines),
            f"{where} was written under another precision policy ({lines}): a continued run will not be bitwise equal",
        )


def _cpu_features() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return " ".join(sorted(_REPORTED_CPU_FEATURES & set(value.split())))
    except OSError as error:
        _log.debug("no CPU features: %s", error)
    return "unknown"
