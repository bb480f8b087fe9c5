-- Replace what a request has reserved by what it has used. The Python twin is rules.settle.
--
-- KEYS: as in admit.lua. ARGV: the request's id, then for each holder what is added: seconds to the buckets of requests and of
-- tokens, tokens and cost to the day, tokens and cost to the month. Costs are in whole nano-units.
-- Only what admit.lua wrote down is settled, and it is deleted here: so a settlement that is sent twice changes nothing.

-- Return seconds that time has not refilled yet: rules._settle_bucket.
local function return_to_bucket(holder, bucket, seconds, reserved_at, bucket_end)
  -- What was reserved is missing for a minute at most; a hash that expired since has forgotten what was returned.
  local given = math.min(seconds, reserved_at + 60 - now, bucket_end - holder[bucket .. 'b'] - now)
  if given > 0 then
    holder[bucket] = holder[bucket] - given
    holder[bucket .. 'b'] = holder[bucket .. 'b'] + given
  end
end

-- Add to a period, or subtract; a forgotten period stays forgotten: rules._add_to_period.
local function add_to_period(holder, period, tokens, cost, p)
  local prefix = p
  if holder[p] ~= period then
    if holder['o' .. p] ~= period then return end
    prefix = 'o' .. p
  end
  holder[prefix .. 't'] = math.max(holder[prefix .. 't'] + tokens, 0)
  holder[prefix .. 'n'] = math.max(holder[prefix .. 'n'] + cost, 0)
end

for i = 1, (#KEYS - 1) / 2 do
  local key, added = KEYS[2 * i - 1], {}
  for j = 1, 6 do added[j] = tonumber(ARGV[1 + (i - 1) * 6 + j]) end
  local reserved = redis.call('HGET', KEYS[#KEYS], ARGV[1] .. ' ' .. key)
  if reserved then
    local numbers = {}
    for number in string.gmatch(reserved, '%S+') do numbers[#numbers + 1] = tonumber(number) end
    local day, month, reserved_at, requests_end, tokens_end = unpack(numbers)
    local holder = read_holder(key)
    take_from_bucket(holder, 'r', added[1])
    take_from_bucket(holder, 't', added[2])
    return_to_bucket(holder, 'r', -added[1], reserved_at, requests_end)
    return_to_bucket(holder, 't', -added[2], reserved_at, tokens_end)
    add_to_period(holder, day, added[3], added[4], 'd')
    add_to_period(holder, month, added[5], added[6], 'm')
    write_holder(key, holder)
    redis.call('HDEL', KEYS[#KEYS], ARGV[1] .. ' ' .. key)
  end
  redis.call('ZREM', KEYS[2 * i], ARGV[1])
end
return 0
