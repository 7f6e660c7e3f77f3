"""Parts that several operations share: launches, records of calls, operators, sharding."""
