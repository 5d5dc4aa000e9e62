"""The asyncio client, from which `client.blocking` is generated (`make client`)."""
