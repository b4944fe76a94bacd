"""The routes of the server, a module per API."""
