"""Engines reached over HTTP: existing vLLM, SGLang and ProRL servers, behind the engine protocol."""
