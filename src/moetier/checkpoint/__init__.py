"""Reading a checkpoint: names and config keys, shards under the law of the index, layers, experts and their formats."""
