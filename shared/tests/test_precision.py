from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import pytest

from distmd_protocol import (
    PrecisionPolicy,
    PrecisionWarning,
    ProtocolError,
    pin_fp32,
    precision,
    register_backend,
    warn_if_reduced,
)


class Fake:
    """A backend with one switch."""

    def __init__(self, context=False):
        self.reduced_now = True
        self.context = context
        self.pins = 0

    def register(self, name="fake"):
        def pin():
            self.pins += 1
            self.reduced_now = False

        register_backend(
            name,
            pin=pin,
            report=lambda: {"tf32": self.reduced_now, "device": "none"},
            reduced=lambda: ["tf32 is on"] if self.reduced_now else [],
            context_exists=lambda: self.context,
        )
        return self


@pytest.fixture
def registry(monkeypatch):
    """A registry and an environment of this test's own."""
    fresh = precision._Registry()
    monkeypatch.setattr(precision, "_registry", fresh)
    for name in precision.PINNED_ENVIRONMENT:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    return fresh


def test_pin_sets_the_environment_and_every_backend(registry):
    first, second = Fake().register("one"), Fake().register("two")
    pin_fp32()
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert os.environ["JAX_DEFAULT_MATMUL_PRECISION"] == "highest"
    assert not first.reduced_now
    assert not second.reduced_now
    child = "import os; print(os.environ['NVIDIA_TF32_OVERRIDE'], os.environ['JAX_DEFAULT_MATMUL_PRECISION'])"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["0", "highest"]


def test_pin_is_idempotent(registry):
    backend = Fake().register()
    pin_fp32()
    before = PrecisionPolicy.current()
    pin_fp32()
    assert PrecisionPolicy.current() == before
    assert backend.pins == 2


def test_pin_warns_with_the_remedy_once_a_context_exists(registry):
    Fake(context=True).register()
    with pytest.warns(PrecisionWarning, match="before the first tensor is put on the GPU, or start the program with"):
        pin_fp32()
    pin_fp32()


def test_pin_is_silent_when_the_variable_was_set_before_the_context(registry, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    Fake(context=True).register()
    pin_fp32()


def test_a_scope_under_reduced_precision_warns_once(registry):
    Fake().register()
    with pytest.warns(PrecisionWarning, match=r"DomainParallel opens with reduced.*fake: tf32 is on.*pin_fp32"):
        warn_if_reduced("DomainParallel")
    warn_if_reduced("DomainParallel")
    warn_if_reduced("DifftreParallel")


def test_a_scope_under_full_precision_does_not_warn(registry):
    Fake().register()
    pin_fp32()
    warn_if_reduced("DomainParallel")


def test_an_environment_that_forces_tf32_is_reduced(registry, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.warns(PrecisionWarning, match="NVIDIA_TF32_OVERRIDE=1 forces TF32"):
        warn_if_reduced("DomainParallel")


def test_registering_again_replaces(registry):
    Fake().register()
    quiet = Fake()
    quiet.reduced_now = False
    quiet.register()
    assert precision.reduced_settings() == []
    assert precision.registered_backends() == ("fake",)


def test_policy_goes_through_json(registry, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    Fake().register()
    policy = PrecisionPolicy.current()
    assert PrecisionPolicy.from_json(json.loads(json.dumps(policy.to_json()))) == policy
    assert policy.flat()["backends.fake.tf32"] == "True"
    assert policy.flat()["environment.OMP_NUM_THREADS"] == "1"
    assert policy.cpu["machine"]
    for bad in (
        {},
        {"environment": {}, "backends": {"x": 1}, "cpu": {}},
        {"environment": 1, "backends": {}, "cpu": {}},
    ):
        with pytest.raises(ProtocolError):
            PrecisionPolicy.from_json(bad)


def test_differences_name_the_setting_and_both_values():
    here = PrecisionPolicy({"A": "1"}, {"jax": {"x64": True}, "torch": {"tf32": False}}, {"machine": "x"})
    there = PrecisionPolicy({}, {"jax": {"x64": False}}, {"machine": "y"})
    assert here.differences(there) == [
        ("backends.jax.x64", "True", "False"), ("cpu.machine", "x", "y"), ("environment.A", "1", "-"),
    ]  # fmt: skip
    assert here.differences(here) == []


def test_another_policy_warns_once_with_both(registry):
    Fake().register()
    stored = PrecisionPolicy.from_json(PrecisionPolicy.current().to_json())
    precision.warn_if_other_policy(stored, "it")
    pin_fp32()
    with pytest.warns(PrecisionWarning, match=r"backends\.fake\.tf32: written under True, now False"):
        precision.warn_if_other_policy(stored, "the checkpoint x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision.warn_if_other_policy(stored, "the checkpoint y")
