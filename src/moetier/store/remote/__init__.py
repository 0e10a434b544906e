"""Checkpoints that are not on this machine: ranged requests, a few shards on disk at a time."""
