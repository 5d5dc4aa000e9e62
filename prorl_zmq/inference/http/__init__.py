"""Engines that are reached over HTTP: existing vLLM, SGLang and ProRL servers, behind the engine protocol.

`probe` finds out what a server speaks and serves, a dialect translates, and `http_engine` does the rest.
"""
