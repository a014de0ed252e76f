"""Code that both sides may know: pure maths, survey formats, prompts, the wire, typed config and the launcher."""

__version__ = "0.1.0"
