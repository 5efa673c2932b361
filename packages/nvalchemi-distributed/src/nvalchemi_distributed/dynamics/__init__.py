"""Integrators, sinks and their hooks. Time steps in fs."""

from nvalchemi_distributed.dynamics.base import BaseDynamics
from nvalchemi_distributed.dynamics.convergence import ConvergenceHook
from nvalchemi_distributed.dynamics.nve import NVE
from nvalchemi_distributed.dynamics.nvt_langevin import NVTLangevin, maxwell_boltzmann
from nvalchemi_distributed.dynamics.sinks import ExtxyzSink, HostMemory

__all__ = ["NVE", "BaseDynamics", "ConvergenceHook", "ExtxyzSink", "HostMemory", "NVTLangevin", "maxwell_boltzmann"]
