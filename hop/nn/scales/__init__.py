"""Scales as state: fixed ones, histories of maxima, and transforms of inputs."""
