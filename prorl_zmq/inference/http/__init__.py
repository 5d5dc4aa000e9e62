"""Engines that are reached over HTTP: existing vLLM, SGLang and ProRL servers, behind the engine protocol.

An engine host process of ours holds the pooled connections of one server, so that stage processes speak only ZMQ.
`probe` finds out what a server speaks and serves, a dialect translates, `http_engine` does the rest.
"""
