"""One callable over several processes: their pool, their shards, their times."""
