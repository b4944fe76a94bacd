"""Graphs on the devices that torch knows."""
