"""The connection of RUN to inference engines, and the engines that can be hosted behind that protocol."""
