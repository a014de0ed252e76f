"""Presets: TOML files of config keys. A comment states the purpose; a preset may be based on another preset."""
