"""What each endpoint holds: block keys, the index of runs, and the approximate (own decisions) mode.

`hashing` turns prompts into chained keys; `runs` is the index both modes share; `lru` adds an order of use
and a capacity per endpoint; `capacity` learns how large an engine's cache really is; `approximate` is the
plugin that puts them to work.
"""
