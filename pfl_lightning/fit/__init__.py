"""What a local fit or an evaluation of one client is given, and what it gives: clients and engines stand on it.

============  ===========================================================================
``context``   what a fit knows of its client, its round and its run
``data``      the client's training data with the settings of the fit
``public``    public samples of a round
``tasks``     a client's fit or evaluation as engines take it, and what comes of it
============  ===========================================================================
"""
