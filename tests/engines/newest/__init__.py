"""What a newer version of an engine changed of the interfaces that the connectors use."""
