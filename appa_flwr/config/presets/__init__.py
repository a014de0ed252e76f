"""Named starting points: TOML files of config keys, for `appa run` and `flwr run` alike."""
