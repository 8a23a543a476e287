"""One module for each contender; those of peers import the peer only when they are made."""
