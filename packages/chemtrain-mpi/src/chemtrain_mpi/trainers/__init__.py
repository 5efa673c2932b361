"""Trainers."""

from chemtrain_mpi.trainers.difftre import DifftreParallel

__all__ = ["DifftreParallel"]
