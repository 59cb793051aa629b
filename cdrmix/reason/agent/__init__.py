"""The token memory agent: windows, demonstrations and its policy."""
