"""Encoders on the devices that torch knows."""
