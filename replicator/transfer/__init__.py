"""Moving bytes between nodes: the one verb is `pull`, over one of two lanes (lane.py).

bulk_server, bulk_lane    plain TCP: HTTP/1.1 ranges, sendfile, receive straight into the target
grpc_lane                 the same over the gRPC port, where only that is open or bytes must be encrypted
tickets                   what a bulk request must show
pull                      every block verified, from whichever source works, going on where it stopped
"""
