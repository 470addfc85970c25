"""What the commands of `ppojob` are made of. Imports neither torch, Ray nor vLLM: `ppojob validate` answers at once."""
