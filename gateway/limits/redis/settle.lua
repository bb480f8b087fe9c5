-- Replace what a request has reserved by what it has used. The Python twin is decision.settle in gateway/limits.
--
-- KEYS: as in admit.lua. ARGV: the request's id, or the id of a lease and those of its open requests; then for each holder two texts: first the name and the seconds of a slice (0: of the
-- calendar) of each window; then what is added: seconds to the buckets of requests and of tokens, and for each window the tokens and the
-- cost. Costs are in whole nano-units.
-- Only what admit.lua wrote down is settled, and it is deleted here: so a settlement that is sent twice changes nothing. The requests that
-- outlive a lease have separate reservations afterwards, which count at the time of the lease: lease.py.

-- Return seconds that time has not refilled yet: decision._settle_bucket.
local function return_to_bucket(holder, bucket, seconds, reserved_at, bucket_end)
  -- What was reserved is missing for a minute at most; a hash that expired since has forgotten what was returned.
  local given = math.min(seconds, reserved_at + 60 - now, bucket_end - holder[bucket .. 'b'] - now)
  if given > 0 then
    holder[bucket] = holder[bucket] - given
    holder[bucket .. 'b'] = holder[bucket .. 'b'] + given
  end
end

local ids = words_of(ARGV[1])
local request = ids[1]
for i = 1, (#KEYS - 1) / 2 do
  local key, windows, added = KEYS[2 * i - 1], windows_of(ARGV[2 * i]), words_of(ARGV[2 * i + 1])
  local requests, tokens = tonumber(added[1]), tonumber(added[2])
  for w, window in ipairs(windows) do window.tokens, window.cost = tonumber(added[2 * w + 1]), tonumber(added[2 * w + 2]) end
  local reserved = redis.call('HGET', KEYS[#KEYS], request .. ' ' .. key)
  if reserved then
    local reserved_at, requests_end, tokens_end = string.match(reserved, '(%S+) (%S+) (%S+)')
    reserved_at = tonumber(reserved_at)
    local holder = read_holder(key, windows)
    take_from_bucket(holder, 'r', requests)
    take_from_bucket(holder, 't', tokens)
    return_to_bucket(holder, 'r', -requests, reserved_at, tonumber(requests_end))
    return_to_bucket(holder, 't', -tokens, reserved_at, tonumber(tokens_end))
    for _, window in ipairs(windows) do
      local number = period_of(window, reserved_at)
      local period = known_period(window, number)
      if period then
        period.tokens, period.cost = math.max(period.tokens + window.tokens, 0), math.max(period.cost + window.cost, 0)
        window.changed = number % (SLICES + 1)
      end
    end
    write_holder(key, holder)
    local moved = {}
    for each = 2, #ids do append(moved, ids[each] .. ' ' .. key, reserved) end
    if #moved > 0 then redis.call('HSET', KEYS[#KEYS], unpack(moved)) end
    redis.call('HDEL', KEYS[#KEYS], request .. ' ' .. key)
  end
  redis.call('ZREM', KEYS[2 * i], request)
end
return 'OK'
