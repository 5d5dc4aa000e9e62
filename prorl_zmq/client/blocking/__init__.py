"""The blocking client. Generated from `client.asynchronous` (`make client`), but for `transport`."""
