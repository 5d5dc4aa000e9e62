"""The asyncio client. Written by hand; `client.blocking` is generated from it (`make client`)."""
