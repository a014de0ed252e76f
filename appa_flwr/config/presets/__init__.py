"""Named starting points: TOML files of config keys that begin with what they are for; one may start from another."""
