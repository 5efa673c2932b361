import jax
import pytest

import chemtrain_mpi
import distmd_protocol
from distmd_protocol import PrecisionPolicy
from distmd_protocol.precision import reduced_settings


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    for name in ("NVIDIA_TF32_OVERRIDE", "JAX_DEFAULT_MATMUL_PRECISION"):
        # Set first, so that monkeypatch takes away what the test leaves behind.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    jax.config.update("jax_default_matmul_precision", None)


def test_pin_is_the_protocols_and_reaches_jax():
    assert chemtrain_mpi.pin_fp32 is distmd_protocol.pin_fp32
    chemtrain_mpi.pin_fp32()
    assert jax.config.jax_default_matmul_precision == "highest"


def test_report_says_what_is_in_force():
    report = PrecisionPolicy.current().backends["jax"]
    assert report["platform"] == jax.default_backend()
    assert report["x64"] is False
    assert "device_kind" in report


def test_a_reduced_setting_is_seen_and_pinning_mends_it():
    jax.config.update("jax_default_matmul_precision", "bfloat16")
    assert reduced_settings() == ["jax: jax_default_matmul_precision is bfloat16"]
    chemtrain_mpi.pin_fp32()
    assert reduced_settings() == []
