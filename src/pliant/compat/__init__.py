"""Other people's names for the operators: renaming only, each call ends in a public function.

    mx_driving, torch_npu   the packages of the Ascend vendor
    ascend                  puts these two under their own names, so that unmodified scripts run
    spelling                what such a package is written with
    scripts                 what runs a script

Importing any of them patches nothing.
"""
