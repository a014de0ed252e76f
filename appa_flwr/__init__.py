"""Code that both sides may know: pure maths, survey formats, prompts, the wire, typed config and the launcher."""
