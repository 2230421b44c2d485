"""Tasks: samplers of prompts that know their gold."""
