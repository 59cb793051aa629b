"""`cdrmix doctor`: checks of this machine, in minutes, with a model that has every kind of layer."""
