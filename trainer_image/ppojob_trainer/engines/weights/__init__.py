"""The transfer of a policy's weights from the ranks that train it to the engines that generate with it."""
