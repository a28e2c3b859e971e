"""Protobuf <-> plain values; the only room of the frontend that knows messages.

Pure functions. What leaves here towards the rest of the frontend is plain.
"""
