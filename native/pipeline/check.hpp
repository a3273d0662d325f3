// Assertions that stay on in release builds: a broken invariant ends the process with one line that
// says which, because going on could serve wrong bytes.
#pragma once

#include "io/require.hpp"

#define KVDISK_CHECK(condition) ::kvdisk::io::require(static_cast<bool>(condition), #condition)
